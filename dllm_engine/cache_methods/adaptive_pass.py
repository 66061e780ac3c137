"""Layer pass of dLLM-Cache (arXiv 2506.06295), also for the tokens that MaskKV (arXiv
2510.09309) retains: each layer recomputes the prompt, the response, or the response
rows whose values have changed most.

Between refreshes the residual stream of the response stays live: a row that a layer
does not recompute gets that layer's kept *features* instead, the sum of its attention
output and its feed-forward output when it was last recomputed. (The papers keep the two
outputs separately. They are only added one after the other, so their sum is enough.)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce

from dllm_engine.cache_methods.adaptive import AdaptiveOptions, live_start
from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.step_plan import Scope
from dllm_engine.kernels.paged_attention import PagedTokens
from dllm_engine.kernels.pages import ComputedRows, add_or_renew_features
from dllm_engine.kernels.sampling import NO_TOKEN, uniform
from dllm_engine.kernels.similarity import choose_least_similar, replace_and_compare
from dllm_engine.model_executor.batch_tables import FeatureTables, TokenTables
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import (
    GraphParts,
    LayerPass,
    Repeats,
    Results,
    attend_split,
)
from dllm_engine.model_executor.step_batch import RowChoice, Rows, SplitRows, StepBatch
from dllm_engine.model_executor.transfer import on_device


class LayerSlots(Protocol):
    """Slots of all rows by layer, ``[num_rows, num_kv_heads]`` each."""

    def __getitem__(self, layer: int) -> Tensor: ...


class KeptTables(Protocol):
    """Tables of the keys and values that pages hold."""

    def row_slots(self) -> LayerSlots: ...
    def paged_tokens(self, layer: int) -> PagedTokens: ...
    def graph_inputs(self) -> list[Tensor]: ...


@dataclass(frozen=True)
class LayersRun:
    """Tensors of one run of the layers. Layers write into them."""

    hidden: Tensor
    phases: RotaryPhases
    row_slots: LayerSlots
    feature_slots: Tensor
    """``FeatureTables.row_slots``"""
    rows: Tensor
    """Rows that each layer recomputes, ``[num_layers, num_rows]``."""


class AdaptivePass(LayerPass):
    """Pass that refreshes the scope of each request's plan, and with an
    ``AdaptiveStep`` also some response rows outside the scope.

    Requests that refresh different scopes, and requests between refreshes, share the
    pass. Pages hold K/V, and features of the rows whose states every step needs.
    """

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        self.options = AdaptiveOptions.of(batch.canvases[0].spec)
        self.batch = batch
        self.pages = pages
        self.tables = self._tables(batch, pages)
        self.first_adaptive_layer = int(self.options.refresh_first_layer)
        """Layers before this one recompute every row in every step, and keep no
        features, as in the authors' code. So changed tokens enter all other layers."""
        device = batch.device
        kept = [
            Span(live_start(canvas.spec), canvas.layout.canvas_length)
            for canvas in batch.canvases
        ]
        self.features = FeatureTables(batch, pages, kept, pages.geometry.hidden_size)
        self.num_layers = pages.geometry.num_layers
        self.all_rows = self._split(batch.sizes)
        refreshed = []
        responses = []
        for i, plan in enumerate(batch.plans):
            rows = batch.rows(i)
            in_response = plan.span.stop - batch.canvases[i].layout.prompt_length
            response = Span(rows.stop - in_response, rows.stop)
            scopes = {
                Scope.ALL: Span(rows.start, rows.stop),
                Scope.PROMPT: Span(rows.start, response.start),
                Scope.RESPONSE: response,
            }
            refreshed.append(scopes.get(plan.scope, Span(rows.start, rows.start)))
            responses.append(response)
        self.num_updated = [
            None if plan.own is None else plan.own.num_updated for plan in batch.plans
        ]
        """Number of response rows that each layer chooses, per request; None: layers
        choose no rows.
        """
        self.choice = RowChoice(refreshed, responses, self.num_updated, device)
        """Recomputed rows: refreshed rows, and the response rows that have changed
        most.
        """
        verified = self.choice.chosen_from
        self.verified: Rows | None = None
        """Rows whose values are compared; a slice if they are all rows of the batch in
        order.
        """
        if np.array_equal(verified, np.arange(batch.bounds[-1])):
            self.verified = slice(None)
        elif verified.size:
            self.verified = on_device(verified, device)
        if self.options.similarity != "random" and batch.only_reuses:
            self.repeats = Repeats.SAME_WORK
        self.some_rows = self._split(self.choice.sizes)
        self.places = torch.full_like(batch.positions, -1)
        """Place of each row among the recomputed rows, or −1. Each layer sets the
        places of the rows that it chooses from.
        """
        self.places[self.choice.fixed] = self.choice.fixed_places

    def _tables(self, batch: StepBatch, pages: PageMemory) -> KeptTables:
        """Tables of the K/V of the whole canvas, by position."""
        return TokenTables(batch, pages)

    def _split(self, sizes: Sequence[int]) -> SplitRows:
        """Split of the rows that a layer recomputes; ``sizes`` per request. A canvas
        that is recomputed as a whole attends to its fresh rows, unless its pages hold
        fewer tokens."""
        keeps_all = isinstance(self.tables, TokenTables)
        alone = [
            size == canvas.layout.canvas_length and (keeps_all or plan.forward == 0)
            for size, canvas, plan in zip(
                sizes, self.batch.canvases, self.batch.plans, strict=True
            )
        ]
        return SplitRows(sizes, alone, self.batch.device)

    def graph_parts(self) -> GraphParts | None:
        layout = tuple(
            (rows.num_paged_rows, *rows.sizes)
            for rows in (self.all_rows, self.some_rows)
        )
        if self.options.similarity == "random":
            return None  # random numbers depend on the request's seed and the step
        verified = [self.verified] if isinstance(self.verified, Tensor) else []
        parts = self.features, self.choice, self.all_rows, self.some_rows, self.tables
        inputs = [
            self.places,
            *verified,
            *(tensor for part in parts for tensor in part.graph_inputs()),
        ]
        return GraphParts(layout, inputs)

    def __call__(
        self, layers: Iterable[DecoderLayer], hidden: Tensor, phases: RotaryPhases
    ) -> tuple[Tensor, Results]:
        """Results: the rows that each adaptive layer recomputes, if some were chosen."""
        rows = self.places.new_empty(self.num_layers, self.some_rows.bounds[-1])
        rows[:, self.choice.fixed_places] = self.choice.fixed
        slots = self.tables.row_slots(), self.features.row_slots()
        run = LayersRun(hidden, phases, *slots, rows)
        for index, layer in enumerate(layers):
            recompute = (
                self._recompute_all
                if index < self.first_adaptive_layer
                else self._recompute_some
            )
            recompute(run, index, layer)
        chosen = [] if self.verified is None else [rows[self.first_adaptive_layer :]]
        return hidden, chosen

    def rows_computed(self, index: int, num_rows: int, results: Results) -> int:
        first = self.first_adaptive_layer
        rest = self.num_layers - first
        total = first * num_rows + rest * self.some_rows.sizes[index]
        return -(-total // self.num_layers)

    def record(self, index: int, results: Results) -> dict[str, Any]:
        count = self.num_updated[index]
        if count is None:
            return {}
        stop = self.some_rows.bounds[index + 1]
        rows = [
            chosen[stop - count : stop] for by_layer in results for chosen in by_layer
        ]
        return {
            "updated_positions": [
                sorted(self.batch.positions[chosen].tolist()) for chosen in rows
            ]
        }

    def _recompute_all(self, run: LayersRun, index: int, layer: DecoderLayer) -> None:
        hidden = run.hidden
        qkv = layer.qkv(layer.attn_norm(hidden), run.phases)
        attended = layer.o_proj(self._attend(run, index, self.all_rows, None, qkv))
        hidden += layer.mlp(layer.mlp_norm(hidden, attended))

    def _recompute_some(self, run: LayersRun, index: int, layer: DecoderLayer) -> None:
        values = self._choose(run, index, layer)
        rows = run.rows[index]
        x = attended = update = run.hidden[rows]
        if rows.numel():
            parts, known = ("qkv", []) if values is None else ("qk", [values[rows]])
            qkv = [*layer.qkv(layer.attn_norm(x), run.phases[rows], parts), *known]
            attended = layer.o_proj(self._attend(run, index, self.some_rows, rows, qkv))
            x = x + attended
            update = layer.mlp(layer.mlp_norm(x))
        add_or_renew_features(
            run.hidden,
            self.features.rows,
            run.feature_slots[index],
            self.places,
            ComputedRows(attended, x, update),
        )

    def _choose(self, run: LayersRun, index: int, layer: DecoderLayer) -> Tensor | None:
        """Choose the rows that the layer recomputes. Returns the values of all rows of
        the batch if all rows are compared.

        dLLM-Cache's V-verify: project all response rows to values, choose the rows
        least similar to the kept values, and replace all kept values by the fresh ones.
        A random choice compares nothing.
        """
        if self.verified is None:
            return None
        values = None
        metric = str(self.options.similarity_metric)
        if self.options.similarity == "random":
            sums = self._random_numbers(index, self.verified)[None]
            metric = "random"
        else:
            by_value = self.options.similarity == "value"
            normed = layer.attn_norm(run.hidden[self.verified])
            part = "v" if by_value else "k"
            (fresh,) = layer.qkv(normed, run.phases[self.verified], part)
            kept = self.pages.values if by_value else self.pages.keys
            sums = replace_and_compare(fresh, kept, run.row_slots[index][self.verified])
            sums = tensor_model_parallel_all_reduce(sums)
            values = fresh if by_value and isinstance(self.verified, slice) else None
        for own_sums, candidates, places in self.choice.by_group(sums):
            choose_least_similar(
                own_sums, metric, candidates, places, run.rows[index], self.places
            )
        return values

    def _random_numbers(self, layer: int, rows: Rows) -> Tensor:
        """A random number for each row, which does not depend on the batch or the rank."""
        counters = [
            [canvas.seed for canvas in self.batch.canvases],
            [plan.forward for plan in self.batch.plans],
        ]
        requests = self.batch.requests[rows]
        seeds, forwards = on_device(counters, self.batch.device)[:, requests]
        positions = self.batch.positions[rows]
        # Token ids below ``NO_TOKEN``, so that these draws are independent of the draws
        # of tokens and positions.
        tokens = torch.full_like(positions, NO_TOKEN - 1 - layer)
        return uniform(seeds, forwards, positions, tokens)

    def _attend(
        self,
        run: LayersRun,
        layer: int,
        computed: SplitRows,
        rows: Tensor | None,
        qkv: Sequence[Tensor],
    ) -> Tensor:
        """Write K/V of the recomputed rows to pages, then attend. ``rows``: their
        indices in the batch; None: all rows.
        """
        _, k, v = qkv
        self.pages.write(k, v, run.row_slots[layer], rows)
        return attend_split(layer, self.tables, qkv, computed, attend_fresh=False)
