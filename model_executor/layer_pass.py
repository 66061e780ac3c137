"""Layer passes: who runs the layers of a model over which rows.

A model's layers expose parts only. A layer pass owns the loop over them; it may drop rows between layers (early
skipping) or compute some parts for all rows and others for a few (adaptive updates).
"""

from collections.abc import Iterable
from typing import Protocol

import torch

from dllm_engine.kernels.attention import bidirectional_attention
from dllm_engine.kernels.eviction import write_retained
from dllm_engine.kernels.paged_attention import paged_attention
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.scheduler.decoding import DecodingSpec
from dllm_engine.scheduler.refresh_plan import RefreshState, StepPlan


class LayerPass(Protocol):
    """Runs all layers in one forward pass."""

    def __call__(self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases) -> torch.Tensor:
        """Hidden states ``[num_rows, hidden_size]`` after the last layer, from the embeddings of the same rows.

        ``hidden`` belongs to the pass, which may write into it.
        """


class DensePass:
    """Every row through every layer; each sequence attends to all of itself."""

    def __init__(self, cu_seqlens: list[int]) -> None:
        """``cu_seqlens``: first row of each sequence and, last, the number of rows."""
        self.cu_seqlens = cu_seqlens

    def __call__(self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases) -> torch.Tensor:
        for layer in layers:
            q, k, v = layer.qkv(layer.attn_norm(hidden))
            attended = bidirectional_attention(layer.rope(q, phases), layer.rope(k, phases), v, self.cu_seqlens)
            hidden += layer.o_proj(attended)
            hidden += layer.mlp(layer.mlp_norm(hidden))
        return hidden


class RetentionRule(Protocol):
    """Which tokens of a layer an UPDATE step retains."""

    def __call__(self, spec: DecodingSpec, plan: StepPlan, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Canvas positions, ascending, ``[plan.retained]`` int64.

        ``q`` ``[canvas_length, num_heads, head_dim]`` and ``k`` ``[canvas_length, num_kv_heads, head_dim]`` are this
        layer's, after RoPE, of this rank's heads. The answer must be the same on every rank.
        """


class RetentionPass:
    """Every computed row through every layer; attention over what is retained in pages and the fresh rows.

    Requests in every refresh state share the pass: FULL and UPDATE requests attend to their own rows, REUSE requests
    to their pages as well, and after the attention of each layer UPDATE requests write what the rule retains.
    """

    def __init__(self, batch: StepBatch, pages: PageMemory, rule: RetentionRule) -> None:
        self.batch = batch
        self.pages = pages
        self.rule = rule
        device = batch.input_ids.device
        heads = pages.num_kv_heads
        reused = [plan.retained if plan.state is RefreshState.REUSE else 0 for plan in batch.plans]
        self.updating = [i for i, plan in enumerate(batch.plans) if plan.state is RefreshState.UPDATE]
        self.retained_positions: dict[int, list[torch.Tensor]] = {i: [] for i in self.updating}
        """Per UPDATE request of the batch: what each layer retained."""
        self.any_reuse = any(reused)
        # On the host already, so that a GPU launch does not wait to learn them.
        self.max_head_len = max(reused)
        self.max_seqlen = max(plan.span.size for plan in batch.plans)
        if self.any_reuse:
            num_requests = len(batch.plans)
            widest = max(table.shape[1] for table in batch.page_tables)
            num_layers = next(table.shape[0] for table in batch.page_tables if table.shape[1])
            self.page_tables = torch.zeros(num_layers, num_requests, widest, dtype=torch.int32, device=device)
            for i, table in enumerate(batch.page_tables):
                if table.shape[1]:
                    self.page_tables[:, i, : table.shape[1]] = table
            # Token-major: the heads of a token lie side by side, so tables grow by appending pages.
            self.head_start = torch.arange(heads, dtype=torch.int32, device=device).expand(num_requests, heads)
            self.token_stride = torch.full((num_requests,), heads, dtype=torch.int32, device=device)
            lengths = torch.tensor(reused, dtype=torch.int32, device=device)
            self.head_len = lengths[:, None].expand(num_requests, heads)
            self.cu_seqlens = torch.tensor(batch.cu_seqlens, dtype=torch.int32, device=device)

    def __call__(self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases) -> torch.Tensor:
        for index, layer in enumerate(layers):
            q, k, v = layer.qkv(layer.attn_norm(hidden))
            q, k = layer.rope(q, phases), layer.rope(k, phases)
            hidden += layer.o_proj(self._attend(index, q, k, v))
            hidden += layer.mlp(layer.mlp_norm(hidden))
            self._retain(index, q, k, v)
        return hidden

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not self.any_reuse:
            return bidirectional_attention(q, k, v, self.batch.cu_seqlens)
        return paged_attention(
            q,
            k,
            v,
            self.cu_seqlens,
            self.pages.keys,
            self.pages.values,
            self.page_tables[layer],
            self.head_start,
            self.token_stride,
            self.head_len,
            attend_fresh=True,
            max_seqlen=self.max_seqlen,
            max_head_len=self.max_head_len,
        )

    def _retain(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for i in self.updating:
            rows = self.batch.rows(i)
            positions = self.rule(self.batch.specs[i], self.batch.plans[i], q[rows], k[rows])
            table = self.batch.page_tables[i][layer]
            write_retained(k[rows], v[rows], positions, self.pages.keys, self.pages.values, table)
            self.retained_positions[i].append(positions)
