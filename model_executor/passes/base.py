"""Layer passes: who runs the layers of a model over which rows.

A model's layers expose parts only. A layer pass owns the loop over them; it may drop rows between layers (early
skipping) or compute some parts for all rows and others for a few (adaptive updates).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from dllm_engine.kernels.attention import bidirectional_attention
from dllm_engine.kernels.eviction import write_retained
from dllm_engine.kernels.paged_attention import attention_with_lse
from dllm_engine.model_executor.batch_tables import BatchTables, KVTables
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.retention.scorers import ScoredLayer
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.policy import TokenStatistics
from dllm_engine.scheduler.page_layout import PageKind
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.scheduler.step_plan import RefreshState, StepPlan


class LayerPass(ABC):
    """Runs all layers in one forward pass."""

    finished: torch.Tensor | None = None
    """After the pass, ``[num_rows]`` bool: the rows that went through all layers; None: all of them. Only finished
    rows predict a token."""

    observes = False
    """Whether the pass wants to be told what was predicted."""

    @property
    def repeats(self) -> bool:
        """Whether the pass, run once more, does the same work on whatever tokens there are then."""
        return False

    @abstractmethod
    def __call__(self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases) -> torch.Tensor:
        """Hidden states ``[num_rows, hidden_size]`` after the last layer, from the embeddings of the same rows.

        ``hidden`` belongs to the pass, which may write into it.
        """

    def observe(self, index: int, positions: torch.Tensor, statistics: TokenStatistics) -> None:  # noqa: B027
        """What was predicted at masked positions of a request, before any of them is unmasked."""

    def rows_computed(self, index: int, num_rows: int) -> int:
        """Rows that the pass computed for a request of ``num_rows``, as a mean over the layers, rounded up."""
        return num_rows

    def kv_slots(self, index: int) -> list[int] | None:
        """Slots of keys that each layer of a request turned out to need, on the rank that needs most; None where the
        pass has settled nothing."""
        return None

    def record(self, index: int) -> dict[str, Any]:
        """Trace entries of the pass for a request, by their names in ``DiffusionFigures.trace``."""
        return {}


class DensePass(LayerPass):
    """Every row through every layer; each sequence attends to all of itself."""

    def __init__(self, cu_seqlens: list[int]) -> None:
        """``cu_seqlens``: first row of each sequence and, last, the number of rows."""
        self.cu_seqlens = cu_seqlens

    @property
    def repeats(self) -> bool:
        return True

    def __call__(self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases) -> torch.Tensor:
        for layer in layers:
            q, k, v = layer.qkv(layer.attn_norm(hidden), phases)
            hidden += layer.o_proj(bidirectional_attention(q, k, v, self.cu_seqlens))
            hidden += layer.mlp(layer.mlp_norm(hidden))
        return hidden


class RetentionRule(Protocol):
    """Which tokens of a layer an UPDATE step retains."""

    def __call__(self, spec: DecodingSpec, plan: StepPlan, layer: ScoredLayer) -> torch.Tensor:
        """Canvas positions, ascending, ``[plan.retained]`` int64; the first ``plan.read`` are in pages already.

        ``layer`` holds the rows that the plan computes. The answer must be the same on every rank.
        """


class PagedPass(LayerPass):
    """Every row through every layer; attention over what is retained in pages and the fresh rows.

    Nothing but tensors on the device enters it, and the host asks nothing of them.
    """

    def __init__(self, tokens: KVTables, cu_seqlens: torch.Tensor, max_seqlen: int) -> None:
        """
        Args:
            tokens: what is retained.
            cu_seqlens: first row of each request and, last, the number of rows; int32.
            max_seqlen: the most rows of a request.
        """
        self.tokens, self.cu_seqlens, self.max_seqlen = tokens, cu_seqlens, max_seqlen

    def __call__(self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases) -> torch.Tensor:
        for index, layer in enumerate(layers):
            q, k, v = layer.qkv(layer.attn_norm(hidden), phases)
            hidden += layer.o_proj(self._attend(index, q, k, v))
            hidden += layer.mlp(layer.mlp_norm(hidden))
            self._retain(index, q, k, v)
        return hidden

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.tokens.attend(layer, q, k, v, self.cu_seqlens, self.max_seqlen, attend_fresh=True)

    def _retain(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """After a layer, write what it retains to pages."""


class RetentionPass(PagedPass):
    """A paged pass in which UPDATE requests retain tokens.

    Requests in every refresh state share the pass: each attends to its own rows and to what its plan reads in pages,
    and after the attention of each layer UPDATE requests write what the rule retains behind what they read.
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

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not self.reads:
            return bidirectional_attention(q, k, v, self.batch.cu_seqlens)
        return super()._attend(layer, q, k, v)

    def _retain(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
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
