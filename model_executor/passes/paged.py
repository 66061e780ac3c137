"""Passes that compute every row in every layer, and attend to what pages retain as well."""

from typing import Any, Protocol

import torch

from dllm_engine.kernels.attention import bidirectional_attention
from dllm_engine.kernels.eviction import write_retained
from dllm_engine.kernels.paged_attention import attention_with_lse
from dllm_engine.model_executor.batch_tables import BatchTables, KVTables
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import LayerPass
from dllm_engine.model_executor.retention.scorers import ScoredLayer
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.scheduler.page_layout import PageKind
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.scheduler.step_plan import RefreshState, StepPlan


class RetentionRule(Protocol):
    """Which tokens of a layer an UPDATE step retains."""

    def __call__(self, spec: DecodingSpec, plan: StepPlan, layer: ScoredLayer) -> torch.Tensor:
        """Canvas positions, ascending, ``[plan.retained]`` int64; the first ``plan.read`` are in pages already.

        ``layer`` holds the rows that the plan computes. The answer must be the same on every rank.
        """


class PagedPass(LayerPass):
    """Attends to what pages retain and to the fresh rows. Uses tensors on the device only; the host reads none of
    them."""

    def __init__(self, tokens: KVTables, cu_seqlens: torch.Tensor, max_seqlen: int) -> None:
        """
        Args:
            tokens: what is retained.
            cu_seqlens: first row of each request and, last, the number of rows; int32.
            max_seqlen: the most rows of a request.
        """
        self.tokens, self.cu_seqlens, self.max_seqlen = tokens, cu_seqlens, max_seqlen

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.tokens.attend(layer, q, k, v, self.cu_seqlens, self.max_seqlen, attend_fresh=True)


class RetentionPass(PagedPass):
    """A paged pass in which UPDATE requests retain tokens.

    Requests in every refresh state share the pass: each attends to its own rows and to what its plan reads in pages,
    and in each layer UPDATE requests write what the rule retains behind what they read.
    """

    def __init__(
        self,
        batch: StepBatch,
        pages: PageMemory,
        rule: RetentionRule,
        *,
        needs_lse: bool = False,
        observation_window: int = 0,
    ) -> None:
        """``needs_lse`` and ``observation_window``: as the scorer that the rule goes by wants them."""
        self.batch = batch
        self.pages = pages
        self.rule = rule
        self.needs_lse, self.observation_window = needs_lse, observation_window
        self.retained: dict[int, list[torch.Tensor]] = {
            i: [] for i, plan in enumerate(batch.plans) if plan.state is RefreshState.UPDATE
        }
        """Per UPDATE request of the batch: what each layer retained."""
        device = batch.input_ids.device
        read = [plan.read for plan in batch.plans]
        self.reads = any(read)
        """Whether any request attends to pages."""
        tables = BatchTables(batch, PageKind.KV).tables
        tokens = KVTables(pages, tables, on_device(read, device, torch.int32), max(read))
        cu_seqlens = on_device(batch.cu_seqlens, device, torch.int32)
        super().__init__(tokens, cu_seqlens, max(batch.num_rows(i) for i in range(len(batch.plans))))

    @property
    def repeats(self) -> bool:
        return not self.retained

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.reads:
            out = super().attend(layer, q, k, v)
        else:
            out = bidirectional_attention(q, k, v, self.batch.cu_seqlens)
        self._retain(layer, q, k, v)
        return out

    def _retain(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write to pages what the layer retains."""
        for i, retained in self.retained.items():
            rows, canvas, plan = self.batch.rows(i), self.batch.canvases[i], self.batch.plans[i]
            lse = (
                attention_with_lse(q[rows], k[rows], v[rows], [0, rows.stop - rows.start])[1]
                if self.needs_lse
                else None
            )
            scored = ScoredLayer.of(
                canvas, plan, q[rows], k[rows], lse, layer, self.pages.total_kv_heads, self.observation_window
            )
            positions = self.rule(canvas.spec, plan, scored)
            added = positions[plan.read :] - plan.span.start
            table = canvas.page_tables[PageKind.KV][layer]
            write_retained(k[rows], v[rows], added, self.pages.keys, self.pages.values, table, plan.read)
            retained.append(positions)

    def record(self, index: int) -> dict[str, Any]:
        retained = self.retained.get(index)
        return {} if retained is None else {"retained_positions": [positions.tolist() for positions in retained]}


# Retention rules, and what they are made of


def retain_before_block(spec: DecodingSpec, plan: StepPlan, layer: ScoredLayer) -> torch.Tensor:
    """The prompt and the finished blocks."""
    return torch.arange(plan.block.start, device=layer.k.device)


def retain_outside_block(spec: DecodingSpec, plan: StepPlan, layer: ScoredLayer) -> torch.Tensor:
    """Everything outside the block, the masked suffix included."""
    return outside_block(spec, plan, layer.k.device)


def outside_block(spec: DecodingSpec, plan: StepPlan, device: torch.device) -> torch.Tensor:
    """Canvas positions before and after the block, ascending."""
    start, stop = plan.block
    return torch.cat((torch.arange(start, device=device), torch.arange(stop, spec.canvas_length, device=device)))
