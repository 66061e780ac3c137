"""Layer pass of MaskKV (arXiv 2510.09309): masked positions vote on the prompt in the
first pass, and each KV head of each layer retains as many tokens as its budget allows.
Later passes follow dLLM-Cache's schedule on the retained tokens."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_gather,
)

from dllm_engine.cache_methods.adaptive_pass import AdaptivePass, LayersRun
from dllm_engine.cache_methods.maskkv.budgets import head_budgets, layer_budgets
from dllm_engine.cache_methods.maskkv.head_tables import HeadTables
from dllm_engine.cache_methods.maskkv.method import (
    MEASURED_IMPORTANCE,
    ImportanceName,
    MaskKVOptions,
    average_budget,
    measures_layers,
)
from dllm_engine.cache_methods.scorers import SCORERS, ScoredLayer
from dllm_engine.kernels.attention import bidirectional_attention
from dllm_engine.kernels.attention_scores import max_pooled
from dllm_engine.kernels.paged_attention import attention_with_lse
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import (
    GraphParts,
    Results,
    attend_paged,
)
from dllm_engine.model_executor.step_batch import RowBounds, SplitRows, StepBatch


class MaskKVPass(AdaptivePass):
    """Pass that votes and evicts in a request's first pass, and then works like
    dLLM-Cache's pass.
    """

    options: MaskKVOptions
    tables: HeadTables

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        super().__init__(batch, pages)
        self.voting = [i for i, plan in enumerate(batch.plans) if plan.forward == 0]
        self.measuring = [
            i for i in self.voting if measures_layers(batch.canvases[i].spec)
        ]
        num_ranks = pages.geometry.total_kv_heads // pages.num_kv_heads
        self.rank_tokens = torch.zeros(
            len(self.voting), num_ranks, dtype=torch.int64, device=batch.device
        )
        """Prompt tokens that the heads of each rank retain in all layers so far, for
        each request of ``voting``.
        """
        self.budgets: dict[int, list[int]] = {}
        """Prompt tokens per KV head that each layer retains, for each request of
        ``voting``; set once layers are measured.
        """

    def _tables(self, batch: StepBatch, pages: PageMemory) -> HeadTables:
        return HeadTables(batch, pages)

    def graph_parts(self) -> GraphParts | None:
        # The tensors of retained prompts belong to requests, so a graph cannot write
        # them.
        return None if self.tables.prompts else super().graph_parts()

    def __call__(
        self, layers: Iterable[DecoderLayer], hidden: Tensor, phases: RotaryPhases
    ) -> tuple[Tensor, Results]:
        """Results: those of the schedule, then ``rank_tokens`` if any request votes."""
        if not self.voting:
            return super().__call__(layers, hidden, phases)
        layers = list(layers)
        self.budgets = self._layer_budgets(layers, hidden, phases)
        hidden, results = super().__call__(layers, hidden, phases)
        return hidden, [*results, self.rank_tokens]

    def _layer_budgets(
        self, layers: Sequence[DecoderLayer], hidden: Tensor, phases: RotaryPhases
    ) -> dict[int, list[int]]:
        """Prompt tokens per KV head that each layer retains, for each request of
        ``voting``.

        All layers must have run before the first layer may evict, and until then their
        keys and values would need memory beside the pages. So layers run twice for the
        requests of ``measuring``. The host waits for the measurements of the first run.
        """
        batch = self.batch
        options = self.options
        importance = {index: [0.0] * len(layers) for index in self.voting}
        if self.measuring:
            rows = torch.cat(
                [
                    torch.arange(*batch.bounds[i : i + 2], device=hidden.device)
                    for i in self.measuring
                ]
            )
            bounds = RowBounds([batch.sizes[i] for i in self.measuring], hidden.device)
            name = MEASURED_IMPORTANCE[options.layer_budget]
            measured = layer_importance(
                name, layers, hidden[rows], phases[rows], bounds
            )
            # Broadcast, because sums over ranks may differ in their last bits, and
            # budgets must not.
            by_request = get_tp_group().broadcast(measured.T.contiguous()).tolist()
            importance.update(zip(self.measuring, by_request, strict=True))
        return {
            index: layer_budgets(
                options.layer_budget,
                average_budget(batch.canvases[index].spec),
                layer_importances,
                base_share=options.beta,
            )
            for index, layer_importances in importance.items()
        }

    def rows_computed(self, index: int, num_rows: int, results: Results) -> int:
        return super().rows_computed(index, num_rows, results) + num_rows * (
            index in self.measuring
        )

    def tensors_to_read(self, results: Results) -> list[Tensor]:
        return [results[-1].amax(dim=1)] if self.voting else []

    def take_read_tensors(
        self, index: int, results: Results, arrays: Sequence[np.ndarray]
    ) -> int | None:
        if index not in self.voting:
            return None
        response = (
            self.batch.canvases[index].layout.gen_length
            * self.num_layers
            * self.pages.num_kv_heads
        )
        return int(arrays[0][self.voting.index(index)]) + response

    def record(self, index: int, results: Results) -> dict[str, Any]:
        entries = super().record(index, results[:-1] if self.voting else results)
        if index in self.voting:
            numbers = torch.stack(
                [layer.T for layer in self.batch.canvases[index].own.numbers],
                dim=1,
            )
            retained = self._of_all_heads((numbers >= 0).float()).transpose(0, 1)
            per_head = [
                [head.nonzero()[:, 0].tolist() for head in layer] for layer in retained
            ]
            entries["retained_per_head"] = per_head
            entries["retained_positions"] = [
                sorted(set().union(*layer)) for layer in per_head
            ]
        return entries

    def _of_all_heads(self, rank_values: Tensor) -> Tensor:
        """Gather numbers of all KV heads of the model, ``[total_kv_heads, ...]``, from
        those of this rank, ``[num_kv_heads, ...]``. They must be floating-point,
        because ranks on CPUs exchange no other types. Every rank must call this."""
        world = get_tensor_model_parallel_world_size()
        # With more ranks than heads, neighbouring ranks have the same head.
        copies = world * rank_values.shape[0] // self.pages.geometry.total_kv_heads
        return tensor_model_parallel_all_gather(rank_values, dim=0)[::copies]

    def _attend(
        self,
        run: LayersRun,
        layer: int,
        computed: SplitRows,
        rows: Tensor | None,
        qkv: Sequence[Tensor],
    ) -> Tensor:
        """Attend like dLLM-Cache's pass. Requests that attend alone are in their first
        pass, and vote before anything is written.
        """
        n, (q, k, v) = computed.num_paged_rows, qkv
        if n == q.shape[0]:
            return super()._attend(run, layer, computed, rows, qkv)
        out, lse = attention_with_lse(q[n:], k[n:], v[n:], computed.alone.bounds)
        for index in self.voting:
            first, stop = computed.bounds[index : index + 2]
            own_lse = lse[first - n : stop - n]
            self._vote(layer, index, q[first:stop], k[first:stop], own_lse)
        self.pages.write(k, v, run.row_slots[layer], rows)
        if not n:
            return out
        paged = attend_paged(layer, self.tables, qkv, computed, attend_fresh=False)
        return torch.cat((paged, out))

    def _vote(
        self,
        layer: int,
        index: int,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
    ) -> None:
        canvas = self.batch.canvases[index]
        heads = k.shape[1]
        spec, options, first_head = canvas.spec, self.options, self.pages.first_kv_head
        scorer = SCORERS[options.scorer]
        scored = ScoredLayer(
            q, k, lse, canvas, self.batch.plans[index].window, layer, first_head
        )
        tokens = torch.arange(spec.layout.prompt_length, device=q.device)
        scores = scorer.score(scored, tokens)
        all_scores = self._of_all_heads(scores)
        if average_budget(spec) == spec.layout.prompt_length:
            all_kept = torch.full(
                all_scores.shape[:1], spec.layout.prompt_length, device=q.device
            )
        else:
            budget = self.budgets[index][layer]
            all_kept = head_budgets(
                options.head_budget, all_scores, budget, base_share=options.alpha
            )
        kept = all_kept[first_head : first_head + heads]
        recent = tokens >= spec.layout.prompt_length - scorer.num_recent(kept)[:, None]
        pooled = max_pooled(scores.masked_fill(recent, 0), scorer.pool_kernel_size)
        ranking = (
            pooled.masked_fill(recent, torch.inf)
            .sort(dim=1, descending=True, stable=True)
            .indices
        )
        within = tokens < kept[:, None]
        chosen = torch.zeros_like(within).scatter_(1, ranking, within)
        self.tables.retain(layer, index, chosen, kept)
        rank_tokens = all_kept.view(-1, heads).sum(dim=1)
        self.rank_tokens[self.voting.index(index)] += rank_tokens


_ROWS_AT_ONCE = 1024
"""Rows whose hidden states are compared in float32 at once. This takes no more memory
than vLLM has measured for a pass."""


def layer_importance(
    name: ImportanceName,
    layers: Iterable[DecoderLayer],
    hidden: Tensor,
    phases: RotaryPhases,
    rows: RowBounds,
) -> Tensor:
    """Importance of each layer for some canvases, measured in a forward pass that keeps
    nothing: float32 ``[num_layers, num_canvases]``, 0 to 2, or NaN if hidden states are
    NaN. ``hidden`` ``[num_rows, hidden_size]``: embeddings of the canvases end to end;
    they are not changed. ``rows``: rows of each canvas."""

    def changes(before: Tensor, after: Tensor) -> Tensor:
        parts = zip(
            before.split(_ROWS_AT_ONCE), after.split(_ROWS_AT_ONCE), strict=True
        )
        cosines = torch.cat(
            [torch.cosine_similarity(a.float(), b.float(), dim=-1) for a, b in parts]
        )
        means = torch.stack(
            [canvas_cosines.mean() for canvas_cosines in cosines.split(rows.sizes)]
        )
        return 1 - means.clamp(-1, 1)

    importance = []
    for layer in layers:
        q, k, v = layer.qkv(layer.attn_norm(hidden), phases)
        attended = hidden + layer.o_proj(
            bidirectional_attention(q, k, v, rows.bounds, rows.cu_seqlens)
        )
        after = attended + layer.mlp(layer.mlp_norm(attended))
        importance.append(
            changes(hidden, after if name == "layer_importance" else attended)
        )
        hidden = after
    return torch.stack(importance)
