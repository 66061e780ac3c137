"""Layer pass of ES-dLLM (arXiv 2603.10088): rows that neither change nor are about to
be unmasked leave the pass early.

K/V of the whole canvas are kept by position. A step feeds the window, and after some
layers only its most important rows go on. Deeper layers keep the old K/V of the other
rows. A row is important if its confidence was high when it last went through all
layers, and if its remembered value (hidden state, query, key or value at that layer)
has changed since. With Sparse-dLLM's eviction, a layer attends to a copy of the tokens
that it retained, and to the window.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)

from dllm_engine.cache_methods.es_dllm.method import (
    COPY_PAGES,
    EarlySkipStep,
    ESDLLMOptions,
    RetainedCopy,
)
from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.page_layout import PageKind
from dllm_engine.decoding.step_plan import Scope, StepPlan
from dllm_engine.kernels.attention_scores import (
    mean_query_scores,
    select_retained,
    top_indices,
)
from dllm_engine.kernels.pages import page_places
from dllm_engine.model_executor.batch_tables import (
    ALL_LAYERS,
    FeatureTables,
    TokenTables,
)
from dllm_engine.model_executor.canvas_store import SPARE, Canvas
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
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics, required

POOL_KERNEL_SIZE = 3
"""Width of the max-pooling before eviction, as in Sparse-dLLM."""
NUM_CONFIDENT, CONFIDENT_BONUS = 2, 2.0
"""Number of the most confident rows that get a bonus, and the bonus. They almost always
stay.
"""
LEFTMOST_BONUS = 5.0
"""Bonus of the row that predicts the leftmost masked position of the window, so that
every step makes progress.
"""
UNMASKED_BONUS = 3.0
"""Bonus of the rows that predicted the tokens of the last step."""
SMALLEST_NORM = 1e-6


@dataclass(frozen=True)
class Confidences:
    """State of a request between steps, outside pages."""

    last: Tensor
    """Probability of each canvas position's token when it was last predicted, float32
    ``[canvas_length + 1]``; 0 before. The last entry belongs to no position: with
    shifted logits the last row predicts none.
    """


@dataclass
class LayersRun:
    """Tensors of one run of the layers."""

    row_slots: Tensor
    """``TokenTables.row_slots``"""
    copy_slots: Tensor | None
    """Slots of the rows in the retained copy, if there is one."""
    feature_slots: Tensor | None
    """``FeatureTables.row_slots``, if there are features."""
    stage: SplitRows
    """Rows that the current layer computes."""
    kept_rows: list[Tensor] = field(default_factory=list)
    """Batch rows that went on after each cut so far."""
    copied: dict[int, list[Tensor]] = field(default_factory=dict)
    """Positions outside the window that each layer so far has copied, per request that
    copies."""


class EarlySkipPass(LayerPass):
    """Pass that keeps K/V by canvas position, attends to the kept canvas, and drops
    rows.
    """

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        self.options = ESDLLMOptions.of(batch.canvases[0].spec)
        self.batch, self.pages = batch, pages
        self.num_layers = pages.geometry.num_layers
        self.shift = int(batch.canvases[0].layout.shifts_logits)
        for canvas in batch.canvases:
            if canvas.own is None:
                size = canvas.layout.canvas_length + 1
                canvas.own = Confidences(torch.zeros(size, device=batch.device))
        self.steps: list[EarlySkipStep] = [plan.own for plan in batch.plans]
        self.reading = [step.copying is RetainedCopy.READ for step in self.steps]
        self.skips = [step.skips for step in self.steps]
        self._set_tables()
        self._set_stages()
        if any(self.skips):
            self._set_scores()
        self.drops_rows = any(self.skips) and bool(self.cuts)
        if not self.copied and all(map(self._repeats, range(len(self.steps)))):
            self.repeats = (
                Repeats.AFTER_FOLLOW if any(self.skips) else Repeats.SAME_WORK
            )

    def _set_tables(self) -> None:
        """Set the tables of pages, and what steps with eviction copy."""
        batch, pages, options = self.batch, self.pages, self.options
        self.tables = TokenTables(batch, pages)
        self.copied = {
            i: self._outside_window(i)
            for i, step in enumerate(self.steps)
            if step.copying is RetainedCopy.WRITE
        }
        """Candidates for the copy, per request that copies."""
        kinds = [COPY_PAGES if reads else PageKind.KV for reads in self.reading]
        self.attended = (
            TokenTables(batch, pages, kinds) if any(self.reading) else self.tables
        )
        self.copy_tokens: Tensor | None = None
        if options.evicts:
            self.copies = TokenTables(batch, pages, COPY_PAGES)
            self.copy_tokens = self._copy_tokens()
        self.features: FeatureTables | None = None
        """Remembered values of rows; None if keys or values are compared."""
        if options.keeps_features and options.cuts(self.num_layers):
            predicting = [
                Span(*(end - self.shift for end in canvas.layout.response_span))
                for canvas in batch.canvases
            ]
            width = options.feature_width(pages.geometry)
            self.features = FeatureTables(batch, pages, predicting, width)

    def _set_stages(self) -> None:
        """Set the rows of each layer, and the choices of rows between them."""
        batch = self.batch
        lengths = [canvas.layout.canvas_length for canvas in batch.canvases]
        alone = [
            whole and not reads and not skips
            for whole, reads, skips in zip(
                batch.computes_all(lengths), self.reading, self.skips, strict=True
            )
        ]
        self.stages = [SplitRows(batch.sizes, alone, batch.device)]
        """Rows of the layers between two cuts: one more entry than cuts."""
        self.cuts: dict[int, RowChoice] = {}
        """Choice of the rows that go on, by layer."""
        for layer, fraction in self.options.cuts(self.num_layers).items():
            rows = [Span(*bounds) for bounds in pairwise(self.stages[-1].bounds)]
            whole = [*rows]
            kept: list[int | None] = [None] * len(rows)
            for i, span in enumerate(rows):
                if self.skips[i]:
                    whole[i] = Span(0, 0)
                    kept[i] = self._num_kept(i, fraction, span.size)
            self.cuts[layer] = RowChoice(whole, rows, kept, batch.device)
            sizes = self.cuts[layer].sizes
            self.stages.append(SplitRows(sizes, alone, batch.device))

    def _set_scores(self) -> None:
        """Set what decides which rows stay."""
        batch = self.batch
        predicted = batch.host_positions + self.shift
        firsts = predicted[batch.bounds[:-1]]
        self.scores = [
            canvas.own.last[first : first + size]
            for canvas, first, size in zip(
                batch.canvases, firsts, batch.sizes, strict=True
            )
        ]
        """Views of the requests' confidences, for the positions that their rows
        predict, which are neighbours.
        """
        self.predicted, masked, filled = self._rows_that_skip(predicted)
        self._set_importance(masked, filled)

    def _least_kept(self, index: int, num_unmasked: int) -> int:
        """The fewest rows that a request keeps after a step that filled
        ``num_unmasked`` positions.
        """
        return min(num_unmasked + 2, self.batch.plans[index].window.size)

    def _num_kept(self, index: int, fraction: float, num_rows: int) -> int:
        least = self._least_kept(index, len(self.batch.canvases[index].last_unmasked))
        return min(max(int(fraction * self.batch.sizes[index]), least), num_rows)

    def _repeats(self, index: int) -> bool:
        """Return True if the next steps of a request keep equally many rows, whatever
        they fill.
        """
        plan = self.batch.plans[index]
        last_unmasked = self.batch.canvases[index].last_unmasked
        fewest = 1.0
        if self.skips[index]:
            fewest = min(self.options.cuts(self.num_layers).values(), default=1.0)
        least = self._least_kept(index, max(plan.quota.count, len(last_unmasked)))
        return (
            int(fewest * self.batch.sizes[index]) >= least
            and plan.scope is Scope.ACTIVE
            and not self.steps[index].from_last_unmasked
        )

    def _outside_window(self, index: int) -> Tensor:
        first, stop = (end - self.shift for end in self.batch.plans[index].window)
        canvas = np.arange(self.batch.canvases[index].layout.canvas_length)
        return on_device(np.delete(canvas, slice(first, stop)), self.batch.device)

    def _copy_tokens(self) -> Tensor:
        """Place of each window row in the retained copy of its request, after the
        copied tokens; −1 for other rows, and without a copy.
        """
        batch = self.batch
        windows = [
            Span(0, 0)
            if step.copying is RetainedCopy.NONE
            else Span(*(end - self.shift for end in plan.window))
            for step, plan in zip(self.steps, batch.plans, strict=True)
        ]
        places = batch.places_in(windows)
        num_copied = [step.num_copied for step in self.steps]
        first_places = np.repeat(num_copied, batch.sizes)
        tokens = np.where(places >= 0, first_places + places, -1)
        return on_device(tokens, batch.device)

    def _rows_that_skip(self, predicted: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """For each row: the ``CanvasStore`` index of the position that it predicts,
        whether this is masked, and whether the last step filled it. Rows of requests
        that skip no rows get the spare place, which is neither."""
        table = np.full((3, self.batch.bounds[-1]), [[SPARE], [False], [False]])
        for i, canvas in enumerate(self.batch.canvases):
            if self.skips[i]:
                positions = predicted[self.batch.rows(i)]
                table[:, self.batch.rows(i)] = (
                    canvas.start + positions,
                    canvas.known[positions] < 0,
                    np.isin(positions, canvas.last_unmasked),
                )
        places, masked, filled = on_device(table, self.batch.device).unbind()
        return places, masked > 0, filled > 0

    def _set_importance(self, masked: Tensor, filled: Tensor) -> None:
        """Set the last confidence of each row, which is 0 if its position is not
        masked, and its bonus; ``[num_rows]`` each.
        """
        self.masked, self.confidences = masked, torch.cat(self.scores) * masked
        counts = masked.cumsum(dim=0)
        before = F.pad(counts, (1, 0))[self.batch.cu_seqlens][self.batch.requests]
        self.bonuses = LEFTMOST_BONUS * (masked & (counts - before == 1))
        if self.options.alpha < 1:
            self.bonuses = self.bonuses + UNMASKED_BONUS * filled

    @staticmethod
    def positions(plan: StepPlan, canvas: Canvas) -> np.ndarray:
        start = plan.span.start
        if plan.own.from_last_unmasked and canvas.last_unmasked:
            shift = int(canvas.layout.shifts_logits)
            start = min(start, max(canvas.last_unmasked[0] - shift, 0))
        return np.arange(start, plan.span.stop)

    def follow(self, masked: Tensor) -> None:
        masked = masked[self.predicted]
        self._set_importance(masked, self.masked & ~masked)

    def graph_parts(self) -> GraphParts | None:
        if self.copied:
            return None
        sizes = tuple((stage.num_paged_rows, *stage.sizes) for stage in self.stages)
        layout = sizes, tuple(self.skips), tuple(self.reading)
        skip_inputs = [self.confidences, self.bonuses] if any(self.skips) else []
        parts: list[Any] = [
            self.tables,
            *self.stages,
            *self.cuts.values(),
            *filter(None, [self.features]),
        ]
        if self.copy_tokens is not None:
            skip_inputs.append(self.copy_tokens)
            parts += [self.attended, self.copies]
        skip_inputs += [tensor for part in parts for tensor in part.graph_inputs()]
        return GraphParts(layout, skip_inputs)

    def finished(self, results: Results) -> tuple[Tensor, Sequence[int]] | None:
        return (results[0], self.stages[-1].sizes) if self.drops_rows else None

    def __call__(
        self, layers: Iterable[DecoderLayer], hidden: Tensor, phases: RotaryPhases
    ) -> tuple[Tensor, Results]:
        """Results: if rows are dropped, ``finished`` and the rows that went on after
        each cut; then the positions that each request of ``copied`` has copied,
        ``[num_layers, num_copied]``.
        """
        indicator = self.options.indicator
        slots = copy_slots = None
        if self.features is not None:
            slots = self.features.row_slots()
        if self.copy_tokens is not None:
            places = self.tables.requests, self.copy_tokens
            copy_slots = self.copies.token_slots(ALL_LAYERS, *places)
        run = LayersRun(self.tables.row_slots(), copy_slots, slots, self.stages[0])
        x = hidden
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        for index, layer in enumerate(layers):
            q, k, v = layer.qkv(layer.attn_norm(x), phases)
            cut = self.cuts.get(index)
            if cut is not None and indicator != "hidden_state":
                remembered = {"query": q, "key": k, "value": v}[indicator]
                kept = self._cut(run, index, cut, rows, remembered.flatten(1))
                x, rows, q, k, v = (each[kept] for each in (x, rows, q, k, v))
                phases = phases[kept]
            attended = layer.o_proj(self._attend(run, index, rows, (q, k, v)))
            x += layer.mlp(layer.mlp_norm(x, attended))
            if cut is not None and indicator == "hidden_state":
                kept = self._cut(run, index, cut, rows, x)
                x, rows, phases = x[kept], rows[kept], phases[kept]
        results = [torch.stack(run.copied[i]) for i in self.copied]
        if self.drops_rows:
            hidden[rows] = x
            finished = torch.zeros(
                hidden.shape[0], dtype=torch.bool, device=hidden.device
            )
            results = [finished.index_fill_(0, rows, True), *run.kept_rows, *results]
        return hidden, results

    def _attend(
        self,
        run: LayersRun,
        layer: int,
        rows: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        q, k, v = qkv
        self.pages.write(k, v, run.row_slots[layer], rows)
        if run.copy_slots is not None:
            self.pages.write(k, v, run.copy_slots[layer], rows)
        self._copy_retained(run, layer, q)
        return attend_split(layer, self.attended, qkv, run.stage, attend_fresh=False)

    def _copy_retained(self, run: LayersRun, layer: int, q: Tensor) -> None:
        """Choose tokens like Sparse-dLLM from the kept canvas, and copy them, for
        requests whose plan asks for it. Such a step skips no rows: the mean query is
        over all rows of the request."""
        pages = self.pages
        for i, outside in self.copied.items():
            slots = self.tables.token_slots(layer, torch.full_like(outside, i), outside)
            places = page_places(slots, pages.keys)
            keys = pages.keys[places]
            scores = mean_query_scores(q[run.stage.rows(i)], keys)
            # Ranks score with different heads, but must retain the same tokens. Only
            # the order counts.
            scores = tensor_model_parallel_all_reduce(scores)
            best = select_retained(scores, self.steps[i].num_copied, POOL_KERNEL_SIZE)
            run.copied.setdefault(i, []).append(outside[best])
            numbers = torch.arange(len(best), device=best.device)
            slots = self.copies.token_slots(layer, torch.full_like(best, i), numbers)
            pages.write(keys[best], pages.values[places][best], slots)

    def _cut(
        self,
        run: LayersRun,
        layer: int,
        cut: RowChoice,
        rows: Tensor,
        fresh: Tensor,
    ) -> Rows:
        """Choose the rows that go on; returns their indices in the layer's rows.
        ``fresh`` ``[rows of the layer, width]`` becomes their remembered values."""
        kept: Rows = slice(None)
        if cut.groups:
            members = torch.cat([group_rows.flatten() for group_rows, _ in cut.groups])
            own = rows[members]
            changes = self._changes(run, layer, own, fresh[members])
            kept = cut.rows(
                torch.stack((changes, self.confidences[own], self.bonuses[own])),
                self._most_important,
            )
            run.kept_rows.append(rows[kept])
            run.stage = self.stages[len(run.kept_rows)]
        if self.features is not None and run.feature_slots is not None:
            slots = run.feature_slots[layer][rows[kept]]
            places = page_places(slots, self.features.rows)
            self.features.rows[places] = fresh[kept]
        return kept

    def _changes(
        self, run: LayersRun, layer: int, rows: Tensor, fresh: Tensor
    ) -> Tensor:
        """Difference between ``fresh`` and the remembered values of the rows, relative
        to the size of these; ``[rows]``.
        """
        indicator = self.options.indicator
        if self.options.alpha == 1:
            return fresh.new_zeros(fresh.shape[0], dtype=torch.float32)
        if self.features is not None and run.feature_slots is not None:
            slots = run.feature_slots[layer]
            pages = self.features.rows
        else:
            slots = run.row_slots[layer]
            pages = self.pages.keys if indicator == "key" else self.pages.values
        old = pages[page_places(slots[rows], pages)].flatten(1).float()
        sums = torch.stack(
            ((fresh.float() - old).abs().sum(dim=1), old.square().sum(dim=1))
        )
        width = fresh.shape[1]
        if indicator != "hidden_state":
            # Ranks have different heads, but must keep the same rows.
            sums = tensor_model_parallel_all_reduce(sums)
            width = width * get_tensor_model_parallel_world_size()
        difference, square = sums / width
        return difference / (square.sqrt() + SMALLEST_NORM)

    def _most_important(self, values: Tensor, count: int) -> Tensor:
        """Choose the ``count`` rows that stay by their changes, confidences and
        bonuses, ``values`` ``[3, group, rows]``.

        Near the end of a window most confidences are 0, and the most confident rows
        tie. The result of ``topk`` stays unsorted, as in the authors' code: its order
        decides the ties of the next layer.
        """
        alpha, (changes, confidences, bonuses) = self.options.alpha, values
        changes = changes / changes.amax(dim=1, keepdim=True).clamp(min=1)
        scores = alpha * confidences + (1 - alpha) * changes
        if alpha > 0:
            best = top_indices(confidences, min(NUM_CONFIDENT, confidences.shape[1]))
            scores.scatter_add_(1, best, scores.new_full(best.shape, CONFIDENT_BONUS))
        scores += bonuses
        return top_indices(scores, count, in_order=False)

    def observe(
        self, index: int, positions: Tensor, statistics: TokenStatistics
    ) -> None:
        confidences = statistics.probability
        canvas = self.batch.canvases[index]
        if statistics.held_back is not None and not canvas.layout.shifts_logits:
            # As in the authors' code: the confidence of an end token that came too
            # early is dropped, but not with shifted logits.
            confidences = confidences.masked_fill(statistics.held_back, 0.0)
        written = required(statistics.written)
        last: Tensor = canvas.own.last
        last[positions] = torch.where(written, confidences, last[positions])

    def rows_computed(self, index: int, num_rows: int, results: Results) -> int:
        later = self.options.indicator == "hidden_state"
        first_layers = [0, *(layer + later for layer in self.cuts), self.num_layers]
        layers = [stop - first for first, stop in pairwise(first_layers)]
        total = sum(
            count * stage.sizes[index]
            for count, stage in zip(layers, self.stages, strict=True)
        )
        return -(-total // self.num_layers)

    def record(self, index: int, results: Results) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        if index in self.copied:
            copied = results[-len(self.copied) :][[*self.copied].index(index)]
            entries["retained_positions"] = copied.tolist()
        if self.skips[index]:
            kept_rows = zip(results[1:], self.stages[1:], strict=False)
            stage_rows = [rows[stage.rows(index)] for rows, stage in kept_rows]
            entries["selected_positions"] = [
                sorted(self.batch.positions[rows].tolist()) for rows in stage_rows
            ]
        return entries
