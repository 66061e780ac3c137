"""MaskKV (arXiv 2510.09309): the masked positions vote on the prompt in the first pass, and each KV head of each layer
retains what its budget allows; from then on dLLM-Cache's schedule, on what is retained."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_gather,
)

from dllm_engine.kernels.attention import bidirectional_attention
from dllm_engine.kernels.eviction import max_pooled
from dllm_engine.kernels.paged_attention import PagedTokens, attention_with_lse
from dllm_engine.model_executor.batch_tables import ALL_LAYERS, BatchTables
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.adaptive import AdaptivePass, LayerSlots
from dllm_engine.model_executor.passes.base import attend_alone, attend_pages
from dllm_engine.model_executor.retention.budgets import head_budgets, layer_budgets
from dllm_engine.model_executor.retention.scorers import SCORERS, ScoredLayer
from dllm_engine.model_executor.step_batch import RowBounds, SplitRows, StepBatch
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.scheduler.methods.maskkv import (
    MEASURED_IMPORTANCE,
    ImportanceName,
    MaskKVOptions,
    average_budget,
    measures_layers,
)
from dllm_engine.scheduler.page_layout import PageKind
from dllm_engine.scheduler.step_plan import Scope


@dataclass
class RetainedPrompt:
    """Prompt tokens that each layer of a request retained, on this rank."""

    kept: torch.Tensor
    """Tokens per KV head, int64 ``[num_layers, num_kv_heads]``."""
    numbers: list[torch.Tensor] = field(default_factory=list)
    """Per layer, the number of each token among those that a head retained, −1 where it did not; int32
    ``[prompt_length, num_kv_heads]``."""


class HeadTables(BatchTables):
    """Keys and values in packed ranges of one table that all layers share: layer by layer and head by head, the head's
    retained prompt tokens, then the response. A layer's ranges begin where those before it end, so layers vote in
    order."""

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        super().__init__(batch, PageKind.KV)
        self.batch, self.pages = batch, pages
        device = batch.device
        num_layers, heads = pages.geometry.num_layers, pages.num_kv_heads
        for canvas in batch.canvases:
            if canvas.cache_state is None:
                canvas.cache_state = RetainedPrompt(torch.zeros(num_layers, heads, dtype=torch.int64, device=device))
        self.kept = torch.stack([canvas.cache_state.kept for canvas in batch.canvases], dim=1)
        """``[num_layers, num_requests, num_kv_heads]``"""
        gen_lengths = on_device([canvas.spec.gen_length for canvas in batch.canvases], device)
        self.lengths = (self.kept + gen_lengths[:, None]).int()
        """Of each head's range, like ``kept``."""
        in_order = self.lengths.transpose(0, 1)
        ends = in_order.flatten(1).cumsum(dim=1, dtype=torch.int32).view_as(in_order)
        self.starts = (ends - in_order).transpose(0, 1).contiguous()
        """First slot of each head's range. In a first pass, of the layers that have voted."""
        self.requests = batch.requests
        starts = np.repeat([canvas.spec.prompt_length for canvas in batch.canvases], batch.sizes)
        self.response_index = on_device(batch.host_positions - starts, device)
        """Position of each row in its response; negative in the prompt."""
        unread = [c.spec.canvas_length - plan.read for c, plan in zip(batch.canvases, batch.plans, strict=True)]
        self.unread = on_device(unread, device, torch.int32)
        """Tokens at the end of each response that no row attends to."""
        self.token_stride = torch.ones(len(batch.plans), dtype=torch.int32, device=device)
        self.max_head_len = max(canvas.spec.canvas_length for canvas in batch.canvases)
        self.prompts = [
            (i, batch.bounds[i]) for i, plan in enumerate(batch.plans) if plan.scope in (Scope.ALL, Scope.PROMPT)
        ]
        """Requests whose prompt is recomputed, and the row it begins at."""

    def retain(self, layer: int, index: int, chosen: torch.Tensor, kept: torch.Tensor) -> None:
        """Set what a layer of a request retains: ``chosen`` ``[num_kv_heads, prompt_length]`` bool, ``kept`` its row
        sums."""
        numbers = (chosen.cumsum(dim=1) - 1).masked_fill(~chosen, -1)
        state: RetainedPrompt = self.batch.canvases[index].cache_state
        state.kept[layer] = kept
        state.numbers.append(numbers.T.int())
        gen_length = self.batch.canvases[index].spec.gen_length
        self.kept[layer, index] = kept
        self.lengths[layer, index] = kept + gen_length
        first = self.starts[layer - 1, index, -1] + self.lengths[layer - 1, index, -1] if layer else 0
        self.starts[layer, index] = first + self.lengths[layer, index].cumsum(dim=0) - self.lengths[layer, index]

    def graph_inputs(self) -> list[torch.Tensor]:
        return [self.tables, self.kept, self.lengths, self.starts, self.requests, self.response_index, self.unread]

    def row_slots(self) -> "LayerSlots":
        # While a request votes, where a layer's ranges begin follows from the votes of the layers before it.
        return self if self.prompts else self[ALL_LAYERS]

    def __getitem__(self, layer: int | slice) -> torch.Tensor:
        """The slots of rows in a layer, ``[num_rows, num_kv_heads]``; for a slice of the layers, with a dimension of
        them in front. A slice needs that no prompt is recomputed."""
        start = self.starts[layer]
        slots = (start + self.kept[layer])[..., self.requests, :] + self.response_index[:, None]
        slots.masked_fill_((self.response_index < 0)[:, None], -1)
        for i, first_row in self.prompts:
            layer_numbers = self.batch.canvases[i].cache_state.numbers
            # A request that votes in this pass has not yet, where other requests' rows are verified.
            if isinstance(layer, int) and layer < len(layer_numbers):
                numbers = layer_numbers[layer]
                slots[first_row : first_row + len(numbers)] = torch.where(numbers >= 0, start[i] + numbers, -1)
        per_page = self.pages.keys.shape[1]
        physical = self.tables[0][self.requests[:, None], slots.clamp(min=0) // per_page].long() * per_page
        return torch.where(slots >= 0, physical + slots % per_page, -1)

    def paged_tokens(self, layer: int) -> PagedTokens:
        start, lengths = self.starts[layer], self.lengths[layer] - self.unread[:, None]
        k_pages, v_pages, table = self.pages.keys, self.pages.values, self.tables[0]
        return PagedTokens(k_pages, v_pages, table, start, self.token_stride, lengths, self.max_head_len)


class MaskKVPass(AdaptivePass):
    """Votes and evicts in a request's first pass, then adapts as dLLM-Cache does."""

    options: MaskKVOptions
    tables: HeadTables
    whole_attends_alone = False

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        super().__init__(batch, pages)
        self.voting = [i for i, plan in enumerate(batch.plans) if plan.forward == 0]
        num_ranks = pages.geometry.total_kv_heads // pages.num_kv_heads
        self.rank_tokens = torch.zeros(len(self.voting), num_ranks, dtype=torch.int64, device=batch.device)
        """Prompt tokens that the heads of each rank retain of each of ``voting``, in all layers."""
        self.measuring = [i for i in self.voting if measures_layers(batch.canvases[i].spec)]
        self.budgets: dict[int, list[int]] = {}
        """Per layer, of each of ``voting``."""

    def make_tables(self, batch: StepBatch, pages: PageMemory) -> HeadTables:
        """K/V of the retained prompt and the response."""
        return HeadTables(batch, pages)

    def graph_layout(self) -> Hashable | None:
        return None if self.tables.prompts else super().graph_layout()  # what a prompt retains belongs to its request

    def __call__(self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases) -> torch.Tensor:
        layers, options = list(layers), self.options
        measured = self._measure(layers, hidden, phases)
        for index in self.voting:
            average, importance = (
                average_budget(self.batch.canvases[index].spec),
                measured.get(index, [0.0] * len(layers)),
            )
            self.budgets[index] = layer_budgets(options.layer_budget, average, importance, base_share=options.beta)
        return super().__call__(layers, hidden, phases)

    def _measure(
        self, layers: Sequence[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases
    ) -> dict[int, list[float]]:
        """Importance of the layers to each of ``measuring``.

        All layers must have run before the first may evict, and until then their keys and values would have to be held
        beside the pages. So they run twice. The host waits for what the first run has measured.
        """
        if not self.measuring:
            return {}
        batch, device = self.batch, hidden.device
        rows = torch.cat([torch.arange(*batch.bounds[i : i + 2], device=device) for i in self.measuring])
        bounds = RowBounds([batch.sizes[i] for i in self.measuring], device)
        name = MEASURED_IMPORTANCE[self.options.layer_budget]
        importance = layer_importance(name, layers, hidden[rows], phases[rows], bounds)
        # Sums over ranks may differ in their last bits, and budgets must not.
        by_request = get_tp_group().broadcast(importance.T.contiguous()).tolist()
        return dict(zip(self.measuring, by_request, strict=True))

    def rows_computed(self, index: int, num_rows: int) -> int:
        return super().rows_computed(index, num_rows) + num_rows * (index in self.measuring)

    def asked(self) -> list[torch.Tensor]:
        return [self.rank_tokens.amax(dim=1)] if self.voting else []

    def kv_slots(self, index: int) -> int | None:
        if index not in self.voting:
            return None
        response = self.batch.canvases[index].spec.gen_length * self.num_layers * self.pages.num_kv_heads
        return int(self.answers[0][self.voting.index(index)]) + response

    def record(self, index: int) -> dict[str, Any]:
        entries = super().record(index)
        if index in self.voting:
            numbers = torch.stack([layer.T for layer in self.batch.canvases[index].cache_state.numbers], dim=1)
            retained = self._of_all_heads((numbers >= 0).float()).transpose(0, 1)
            per_head = [[head.nonzero()[:, 0].tolist() for head in layer] for layer in retained]
            entries["retained_per_head"] = per_head
            entries["retained_positions"] = [sorted(set().union(*layer)) for layer in per_head]
        return entries

    def _of_all_heads(self, own: torch.Tensor) -> torch.Tensor:
        """Numbers of all KV heads of the model, ``[total_kv_heads, ...]``, from those of this rank's, ``[num_kv_heads,
        ...]``; floating-point ones, because ranks on CPUs exchange no others. Every rank must call it."""
        world = get_tensor_model_parallel_world_size()
        if world == 1:
            return own
        # With more ranks than heads, neighbouring ranks have the same head.
        copies = world * own.shape[0] // self.pages.geometry.total_kv_heads
        return tensor_model_parallel_all_gather(own, dim=0)[::copies]

    def _attend(
        self,
        layer: int,
        computed: SplitRows,
        rows: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """All requests that attend alone are in their first pass. They vote before anything is written."""
        n = computed.num_paged_rows
        if n == q.shape[0]:
            return super()._attend(layer, computed, rows, q, k, v)
        own, lse = (q[n:], k[n:], v[n:]), None
        if SCORERS[self.options.scorer].needs_lse:
            out, lse = attention_with_lse(*own, computed.alone.bounds)
        else:
            out = attend_alone(*own, computed.alone)
        for index in self.voting:
            first, stop = computed.bounds[index : index + 2]
            self._vote(layer, index, q[first:stop], k[first:stop], None if lse is None else lse[first - n : stop - n])
        self._write(layer, rows, k, v)
        if not n:
            return out
        tokens = self.tables.paged_tokens(layer)
        return torch.cat((attend_pages(tokens, q[:n], k[:n], v[:n], computed.paged, attend_fresh=False), out))

    def _vote(self, layer: int, index: int, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor | None) -> None:
        canvas, heads = self.batch.canvases[index], k.shape[1]
        spec, options, first_head = canvas.spec, self.options, self.pages.first_kv_head
        scorer = SCORERS[options.scorer]
        scored = ScoredLayer(q, k, lse, canvas, self.batch.plans[index].window, layer, first_head)
        tokens = torch.arange(spec.prompt_length, device=q.device)
        scores = scorer.score(scored, tokens)
        all_scores = self._of_all_heads(scores)
        if average_budget(spec) == spec.prompt_length:
            all_kept = torch.full(all_scores.shape[:1], spec.prompt_length, device=q.device)
        else:
            budget = self.budgets[index][layer]
            all_kept = head_budgets(options.head_budget, all_scores, budget, base_share=options.alpha)
        kept = all_kept[first_head : first_head + heads]
        recent = tokens >= spec.prompt_length - scorer.num_recent(kept)[:, None]
        pooled = max_pooled(scores.masked_fill(recent, 0), scorer.pool_kernel_size)
        ranking = pooled.masked_fill(recent, torch.inf).sort(dim=1, descending=True, stable=True).indices
        within = tokens < kept[:, None]
        chosen = torch.zeros_like(within).scatter_(1, ranking, within)
        self.tables.retain(layer, index, chosen, kept)
        self.rank_tokens[self.voting.index(index)] += all_kept.view(-1, heads).sum(dim=1)


_ROWS_AT_ONCE = 1024
"""Rows whose hidden states are compared in float32 at once. They take no more memory than vLLM has measured for a
pass."""


def layer_importance(
    name: ImportanceName, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases, rows: RowBounds
) -> torch.Tensor:
    """Importance of each layer to each of some canvases, in a forward pass over them that keeps nothing.

    ``layer_importance`` is MaskKV's (arXiv 2510.09309, equation 8): 1 − mean cosine between a token's hidden states
    before and after a layer. ``attention_importance`` is SqueezeAttention's (arXiv 2404.04793): the same before and
    after the layer's attention, with the residual.

    Args:
        hidden: embeddings of the canvases, which lie end to end, ``[num_rows, hidden_size]``; left as they are.
        rows: of each canvas.

    Returns:
        float32 ``[num_layers, num_canvases]``, 0 to 2, or NaN where hidden states are no numbers.
    """

    def changes(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        parts = zip(before.split(_ROWS_AT_ONCE), after.split(_ROWS_AT_ONCE), strict=True)
        cosines = torch.cat([torch.cosine_similarity(a.float(), b.float(), dim=-1) for a, b in parts])
        means = torch.stack([canvas_cosines.mean() for canvas_cosines in cosines.split(rows.sizes)])
        return 1 - means.clamp(-1, 1)

    importance = []
    for layer in layers:
        q, k, v = layer.qkv(layer.attn_norm(hidden), phases)
        attended = hidden + layer.o_proj(bidirectional_attention(q, k, v, rows.bounds, rows.cu_seqlens))
        after = attended + layer.mlp(layer.mlp_norm(attended))
        importance.append(changes(hidden, after if name == "layer_importance" else attended))
        hidden = after
    return torch.stack(importance)
