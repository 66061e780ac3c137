"""dLLM-Cache (arXiv 2506.06295), also of what MaskKV (arXiv 2510.09309) retains: each layer recomputes the prompt, the
response, or those response rows whose values have changed most.

Between refreshes the residual stream of the response stays live: a row that a layer does not recompute gets that
layer's kept *features* instead, the sum of its attention output and its feed-forward output when it was last
recomputed. (The papers keep the two apart; they are only ever added one after the other, so their sum is all there is
to keep.)
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.distributed import tensor_model_parallel_all_reduce

from dllm_engine.kernels.pages import add_features, write_features
from dllm_engine.kernels.sampling import NO_TOKEN, uniform
from dllm_engine.kernels.similarity import least_similar, replace_and_compare
from dllm_engine.model_executor.batch_tables import FeatureTables, HeadTables, TokenTables
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import LayerPass, attend_split
from dllm_engine.model_executor.step_batch import RowChoice, Rows, SplitRows, StepBatch
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.scheduler.methods.dllm_cache import DLLMCacheOptions, live_start
from dllm_engine.scheduler.request import Span
from dllm_engine.scheduler.step_plan import RefreshState, Scope


class AdaptivePass(LayerPass):
    """Refreshes the scope of each request's plan, and ``plan.num_updated`` response rows of those it does not cover.

    Requests refreshing different scopes, and those between refreshes, share the pass. Pages hold K/V, and features of
    the rows from the last that the response needs.
    """

    chooses = True
    make_tables: ClassVar[type[TokenTables | HeadTables]] = TokenTables
    """K/V of the whole canvas, by position, or of what the heads of a layer retain."""
    row_slots: torch.Tensor | HeadTables
    """``tables.row_slots``, while the layers run."""
    feature_slots: torch.Tensor
    """``FeatureTables.row_slots``, likewise."""
    kept_slots: torch.Tensor
    """As ``feature_slots``, but −1 for rows that are computed whatever the choice."""

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        self.options = DLLMCacheOptions.of(batch.canvases[0].spec)
        self.batch, self.pages, self.tables = batch, pages, self.make_tables(batch, pages)
        self.first_adaptive_layer = int(self.options.refresh_first_layer)
        """Layers before it recompute every row in every step, and keep no features: as in the authors' code, so that
        changed tokens enter all other layers."""
        device = batch.device
        kept = [Span(live_start(canvas.spec), canvas.spec.canvas_length) for canvas in batch.canvases]
        self.features = FeatureTables(batch, pages, kept, pages.geometry.hidden_size)
        self.num_layers = pages.geometry.num_layers
        self.all_rows = self._split(batch.sizes)
        self.chosen: list[torch.Tensor] = []
        """Per layer so far that chose, the rows that it recomputes."""
        refreshed, responses = [], []
        for i, plan in enumerate(batch.plans):
            first, stop = batch.bounds[i : i + 2]
            response = Span(stop - (plan.span.stop - batch.canvases[i].spec.prompt_length), stop)
            scopes = {Scope.ALL: Span(first, stop), Scope.PROMPT: Span(first, response.start), Scope.RESPONSE: response}
            refreshed.append(scopes.get(plan.scope, Span(first, first)))
            responses.append(response)
        self.choice = RowChoice(refreshed, responses, [plan.num_updated for plan in batch.plans], device)
        """Recomputed rows: those refreshed, and of the response those that have changed most."""
        verified = self.choice.chosen_from
        self.verified: torch.Tensor | slice | None = None
        """Rows whose values are compared; a slice if these are all rows of the batch, in order."""
        self.verified_numbers: torch.Tensor | None = None
        """Number of each batch row among those verified, 0 for others; None: it is the row's own number."""
        if np.array_equal(verified, np.arange(batch.bounds[-1])):
            self.verified = slice(None)
        elif verified.size:
            numbers = np.zeros(batch.bounds[-1], dtype=np.int64)
            numbers[verified] = np.arange(verified.size)
            self.verified, self.verified_numbers = on_device(verified, device), on_device(numbers, device)
        self.counters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if self.verified is not None and self.options.similarity == "random":
            request_numbers = [[canvas.seed for canvas in batch.canvases], [plan.forward for plan in batch.plans]]
            seeds, forwards = on_device(request_numbers, device)[:, self.features.requests[self.verified]]
            self.counters = seeds, forwards, batch.positions[self.verified]
            """Of the random numbers of each verified row: the same at any batch, and on every rank."""
        self.repeats = self.counters is None and all(plan.state is RefreshState.REUSE for plan in batch.plans)
        self.some_rows = self._split(self.choice.sizes)
        self.kept = torch.ones_like(batch.positions, dtype=torch.bool)
        """Rows that keep their features, before rows are chosen."""
        self.kept.index_fill_(0, self.choice.fixed, False)

    def _split(self, sizes: Sequence[int]) -> SplitRows:
        """Rows that a layer recomputes, so many of each request. A canvas that is recomputed as a whole attends to what
        was just computed, unless its pages hold less."""
        keeps_all = isinstance(self.tables, TokenTables)
        alone = [
            size == canvas.spec.canvas_length and (keeps_all or plan.forward == 0)
            for size, canvas, plan in zip(sizes, self.batch.canvases, self.batch.plans, strict=True)
        ]
        return SplitRows(sizes, alone, self.batch.device)

    def graph_layout(self) -> Hashable | None:
        return tuple((rows.num_paged_rows, *rows.sizes) for rows in (self.all_rows, self.some_rows))

    def graph_inputs(self) -> list[torch.Tensor]:
        verified = [x for x in (self.verified, self.verified_numbers) if isinstance(x, torch.Tensor)]
        verified += self.counters or ()
        parts = self.features, self.choice, self.all_rows, self.some_rows, self.tables
        return [self.kept, *verified, *(tensor for part in parts for tensor in part.graph_inputs())]

    def __call__(self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases) -> torch.Tensor:
        self.chosen = []
        self.row_slots, self.feature_slots = self.tables.row_slots(), self.features.row_slots()
        self.kept_slots = self.feature_slots.masked_fill(~self.kept, -1)
        for index, layer in enumerate(layers):
            if index < self.first_adaptive_layer:
                self._recompute_all(index, layer, hidden, phases)
            else:
                self._recompute_some(index, layer, hidden, phases)
        self.results = [torch.stack(self.chosen)] if self.chosen else []
        del self.row_slots, self.feature_slots, self.kept_slots  # their memory is for the next graph
        return hidden

    def rows_computed(self, index: int, num_rows: int) -> int:
        first, rest = self.first_adaptive_layer, self.num_layers - self.first_adaptive_layer
        return -(-(first * num_rows + rest * self.some_rows.sizes[index]) // self.num_layers)

    def record(self, index: int) -> dict[str, Any]:
        count = self.batch.plans[index].num_updated
        if count is None:
            return {}
        stop = self.some_rows.bounds[index + 1]
        rows = [chosen[stop - count : stop] for by_layer in self.results for chosen in by_layer]
        return {"updated_positions": [sorted(self.batch.positions[chosen].tolist()) for chosen in rows]}

    def _recompute_all(self, index: int, layer: DecoderLayer, hidden: torch.Tensor, phases: RotaryPhases) -> None:
        q, k, v = layer.qkv(layer.attn_norm(hidden), phases)
        attended = layer.o_proj(self._attend(index, self.all_rows, slice(None), q, k, v))
        hidden += layer.mlp(layer.mlp_norm(hidden, attended))

    def _recompute_some(self, index: int, layer: DecoderLayer, hidden: torch.Tensor, phases: RotaryPhases) -> None:
        rows, fresh_values = self._choose(index, layer, hidden, phases)
        if rows.numel():
            x = hidden[rows]
            q, k, v = self._project(layer, x, phases[rows], fresh_values)
            attended = layer.o_proj(self._attend(index, self.some_rows, rows, q, k, v))
            x = x + attended
            update = layer.mlp(layer.mlp_norm(x))
            x += update
            update += attended
        add_features(hidden, self.features.rows, self.kept_slots[index])
        if rows.numel():
            write_features(update, self.features.rows, self.feature_slots[index][rows])
            hidden[rows] = x

    def _choose(
        self, index: int, layer: DecoderLayer, hidden: torch.Tensor, phases: RotaryPhases
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows to recompute, and the values of those chosen where verifying has computed them already.

        dLLM-Cache's V-verify: project all response rows to values, choose those least similar to the kept values,
        and replace all kept values by the fresh ones. A choice by chance verifies nothing.
        """
        if self.verified is None:
            return self.choice.fixed, None
        if self.counters is not None:
            # In the place of a token, numbers below ``NO_TOKEN``: apart from what tokens and positions are drawn with.
            drawn = uniform(*self.counters, torch.full_like(self.counters[2], NO_TOKEN - 1 - index))
            self.chosen.append(self.choice.rows(drawn, lambda part, count: part.sort(stable=True).indices[:, :count]))
            return self.chosen[-1], None
        normed, by_value = layer.attn_norm(hidden[self.verified]), self.options.similarity == "value"
        fresh = layer.qkv(normed, phases[self.verified], "v" if by_value else "k")[0]
        kept = self.pages.values if by_value else self.pages.keys
        sums = replace_and_compare(fresh, kept, self.row_slots[index][self.verified])
        sums, metric = tensor_model_parallel_all_reduce(sums), self.options.similarity_metric
        rows = self.choice.rows(sums, lambda part, count: least_similar(part, metric, count))
        self.chosen.append(rows)
        if not by_value:
            return rows, None
        return rows, fresh[rows if self.verified_numbers is None else self.verified_numbers[rows]]

    def _project(
        self, layer: DecoderLayer, x: torch.Tensor, phases: RotaryPhases, values: torch.Tensor | None
    ) -> list[torch.Tensor]:
        normed = layer.attn_norm(x)
        if values is None:
            return layer.qkv(normed, phases)
        # The chosen rows have their values; only the refreshed ones lack them.
        refreshed = self.choice.fixed_places
        if refreshed.numel():
            values[refreshed] = layer.qkv(normed[refreshed], phases, "v")[0]
        return [*layer.qkv(normed, phases, "qk"), values]

    def _attend(
        self, layer: int, computed: SplitRows, rows: Rows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attention of recomputed rows, ``rows`` of the batch, after their K/V have gone to pages."""
        self.pages.write(k, v, self.row_slots[layer][rows])
        return attend_split(layer, self.tables, q, k, v, computed, attend_fresh=False)
