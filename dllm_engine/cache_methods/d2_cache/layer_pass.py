"""d2Cache (arXiv 2509.23094): K/V of the whole canvas are kept by position, and a pass
ends by choosing the rows of the next one.

The next pass computes rows that predict masked positions, chosen by confidence and
certainty prior; the tokens that were just unmasked; and the other tokens that attention
rollout over the layers finds most important.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)

from dllm_engine.cache_methods.d2_cache.method import D2CacheOptions
from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.step_plan import StepPlan
from dllm_engine.decoding.unmasking_policies import (
    WEIGHTED_MEASURES,
)
from dllm_engine.kernels.attention_scores import KeysInPages, summed_probabilities
from dllm_engine.kernels.paged_attention import paged_attention
from dllm_engine.model_executor.batch_tables import ALL_LAYERS, TokenTables
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.graphs.recording import HOST_BOUND_ROWS, padded
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import (
    GraphParts,
    LayerPass,
    Results,
    run_layers,
)
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.unmasking.statistics import (
    TokenStatistics,
    certainty_density,
)


@dataclass
class RowPriorities:
    """State of a request between passes, outside pages."""

    confidence: Tensor
    """Confidence of each canvas position, float32 ``[canvas_length]``; 0 where it was not
    predicted."""
    next_rows: np.ndarray | None = None
    """Canvas positions that the next pass computes, ascending, chosen by the last pass;
    None: all positions."""


class Rollout:
    """Attention rollout of requests: R = I, then R ← ½ (Â + I) R for each layer.

    Â holds the layer's attention probabilities, averaged over heads, in the computed
    rows, and unit rows elsewhere. So all other rows of R stay unit rows, and only
    computed rows are stored: float32 ``[num_requests, num_rows, num_tokens]``, with
    zeros as padding.
    """

    def __init__(self, positions: Tensor, exist: Tensor, num_tokens: int) -> None:
        """``positions``: positions of the computed rows, ``[num_requests, num_rows]``.
        ``exist``: False for padding, bool.
        """
        self.positions = positions
        self.rows = torch.zeros(*positions.shape, num_tokens, device=positions.device)
        self.rows.scatter_(2, positions[..., None], exist[..., None].float())
        self.computed = self.rows.amax(dim=1, keepdim=True) > 0
        """True at positions whose rows are computed, ``[num_requests, 1, num_tokens]``.
        """

    def add_layer(self, probabilities: Tensor, share: float) -> None:
        """Multiply by the next layer. ``probabilities`` ``[num_requests, num_rows,
        num_tokens]``, times ``share``, are attention probabilities averaged over heads.
        They are overwritten."""
        between_computed = probabilities.gather(
            2, self.positions[:, None].expand(-1, probabilities.shape[1], -1)
        )
        others = self.rows.add(
            probabilities.masked_fill_(self.computed, 0), alpha=share
        )
        self.rows = others.baddbmm_(
            between_computed, self.rows, beta=0.5, alpha=0.5 * share
        )

    def importance(self) -> Tensor:
        """Column sums of R, float32 ``[num_requests, num_tokens]``."""
        return self.rows.sum(dim=1).add_(~self.computed[:, 0])


class RolloutPass(LayerPass):
    """Pass that keeps K/V by canvas position, attends to the whole kept canvas, and
    computes the attention rollout.
    """

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        self.batch = batch
        self.pages = pages
        num_rows = batch.bounds[-1]
        sizes = batch.sizes
        lengths = [canvas.layout.canvas_length for canvas in batch.canvases]
        self.tables = TokenTables(batch, pages)
        self.num_tokens = max(lengths)
        """Upper bound of the canvas lengths. It and the numbers of rows are rounded up
        if the pass may be recorded.
        """
        self.graph_rows = 0
        """Rows of the recorded pass; 0: the pass is not recorded."""
        if num_rows <= HOST_BOUND_ROWS and batch.only_reuses:
            *sizes, self.graph_rows = (
                padded(size) or size for size in (*sizes, num_rows)
            )
            self.num_tokens = self.tables.tables.shape[2] * pages.page_size
        self.groups = [(size, len([*group])) for size, group in groupby(sizes)]
        """Upper bound of the rows of a request, and number of neighbouring requests
        with it, in batch order.
        """
        places = self.tables.slots(
            ALL_LAYERS, batch.requests, batch.positions, pages.page_size
        )
        self.places = F.pad(places, (0, max(self.graph_rows - num_rows, 0)), value=-1)
        """Place of each row in pages, ``[num_layers, num_rows]``; −1 behind the rows of
        the batch.
        """
        self.known_before = [
            canvas.known[canvas.layout.prompt_length :] >= 0
            for canvas in batch.canvases
        ]
        """Tokens of each response that are known before the pass, bool."""
        for canvas, length in zip(batch.canvases, lengths, strict=True):
            if canvas.own is None:
                canvas.own = RowPriorities(torch.zeros(length, device=batch.device))

    @staticmethod
    def positions(plan: StepPlan, canvas: Canvas) -> np.ndarray:
        """The rows that the last pass chose; without a pass before, those of the plan."""
        if canvas.own is None or canvas.own.next_rows is None:
            return LayerPass.positions(plan, canvas)
        rows: np.ndarray = canvas.own.next_rows
        return rows

    @staticmethod
    def observed(plan: StepPlan) -> Span | None:
        return None if plan.own is None else plan.own.span

    def graph_parts(self) -> GraphParts | None:
        if not self.graph_rows:
            return None
        inputs = [
            self.places,
            self.batch.cu_seqlens,
            self.tables.tables,
            self.tables.head_len,
            self.tables.token_lens,
        ]
        return GraphParts(tuple(self.groups), inputs, self.graph_rows)

    def __call__(
        self, layers: Iterable[DecoderLayer], hidden: Tensor, phases: RotaryPhases
    ) -> tuple[Tensor, Results]:
        """Results: importance of every position, per group of requests."""
        row_slots = self.pages.slots(self.places[:, : hidden.shape[0]])
        rollouts: list[tuple[slice, Rollout]] = []
        first = 0
        for num_rows, num_requests in self.groups:
            requests = slice(first, first := first + num_requests)
            bounds = self.batch.cu_seqlens[requests.start : requests.stop + 1, None]
            rows = bounds[:-1] + torch.arange(num_rows, device=hidden.device)
            exist = rows < bounds[1:]
            positions = phases.positions[
                rows.clamp(max=hidden.shape[0] - 1)
            ].masked_fill(~exist, 0)
            rollouts.append((requests, Rollout(positions, exist, self.num_tokens)))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.pages.write(k, v, row_slots[layer])
            return self._attend(rollouts, layer, (q, k, v))

        hidden = run_layers(layers, hidden, phases, attend)
        return hidden, [rollout.importance() for _, rollout in rollouts]

    def _attend(
        self,
        rollouts: list[tuple[slice, Rollout]],
        layer: int,
        qkv: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """Attention output of a layer. Its probabilities are added to the rollout of
        each group.
        """
        q = qkv[0]
        tokens = self.tables.paged_tokens(layer)
        bounds = self.batch.cu_seqlens
        most_rows = max(self.groups)[0]
        # lse: logarithm of each softmax's denominator.
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        out = paged_attention(
            *qkv, bounds, tokens, attend_fresh=False, max_seqlen=most_rows, lse=lse
        )
        share = 1 / (q.shape[1] * get_tensor_model_parallel_world_size())
        for requests, rollout in rollouts:
            keys = KeysInPages(
                tokens.k_pages,
                tokens.page_tables[requests],
                tokens.head_len[requests],
            )
            own_bounds = bounds[requests.start : requests.stop + 1]
            shape = rollout.rows.shape[1:]
            sums = summed_probabilities(q, lse, own_bounds, keys, *shape)
            # Ranks have different heads, but must choose the same rows.
            rollout.add_layer(tensor_model_parallel_all_reduce(sums), share)
        return out

    def observe(
        self, index: int, positions: Tensor, statistics: TokenStatistics
    ) -> None:
        canvas = self.batch.canvases[index]
        if self.observed(self.batch.plans[index]) is not None:
            measure = canvas.spec.unmasking.policy.measures
            confidence = statistics.confidence(
                measure if measure in WEIGHTED_MEASURES else "probability"
            )
            canvas.own.confidence[positions] = confidence.float()

    def tensors_to_read(self, results: Results) -> list[Tensor]:
        """Importance and confidence of every position, per request."""
        kept = [canvas.own.confidence for canvas in self.batch.canvases]
        importance = chain.from_iterable(results)
        return [
            torch.stack((x[: len(y)], y)) for x, y in zip(importance, kept, strict=True)
        ]

    def take_read_tensors(
        self, index: int, results: Results, arrays: Sequence[np.ndarray]
    ) -> int | None:
        importance, confidence = arrays[index].astype(np.float64)
        rows = self._next_rows(index, importance, confidence)
        self.batch.canvases[index].own.next_rows = rows
        return None

    def _next_rows(
        self, index: int, importance: np.ndarray, confidence: np.ndarray
    ) -> np.ndarray | None:
        """The rows of a request's next pass, by the importance and the confidence of
        its positions, float64 ``[canvas_length]``; None if no mask is left."""
        canvas = self.batch.canvases[index]
        layout = canvas.layout
        options = D2CacheOptions.of(canvas.spec)
        start = layout.prompt_length
        shift = int(layout.shifts_logits)
        known = canvas.known >= 0
        if known.all():
            return None
        chosen = start + self._masked_to_predict(
            index, known[start:], confidence[start:]
        )
        computed = np.zeros(layout.canvas_length, dtype=bool)
        computed[np.maximum(chosen - shift, 0)] = True
        # The prompt's last row, which predicts the first token, must not affect the
        # choice by rollout.
        last_of_prompt = slice(max(start - shift, 0), start)
        predicts_first = computed[last_of_prompt].copy()
        computed[last_of_prompt] = False
        computed[canvas.last_unmasked] = True
        computed[_most_important(importance, ~computed, options.rollout_p)] = True
        computed[last_of_prompt] = predicts_first
        rows = np.flatnonzero(computed)
        for i in np.flatnonzero(np.diff(rows) <= options.gap_fill):
            computed[rows[i] : rows[i + 1]] = True
        return np.flatnonzero(computed)

    def _masked_to_predict(
        self, index: int, known: np.ndarray, confidence: np.ndarray
    ) -> np.ndarray:
        """Masked positions of the response that a request's next pass should predict:
        the best positions of a stretch, by confidence and certainty prior. Positions of
        its first block come before all others, because the next pass has to fill some
        of them.

        ``known`` (bool) and ``confidence`` (float64) are those of the response,
        ``[gen_length]``.
        """
        spec = self.batch.canvases[index].spec
        options = D2CacheOptions.of(spec)
        masked = np.flatnonzero(~known)
        first_block, unit = self._first_block(index, masked[0])
        scores = confidence * certainty_density(known, options.sigma)
        scores[first_block] += scores.max()
        if spec.ends.delay_eos or spec.unmasking.slow_fast is not None:
            # Predict the leftmost mask in any case, because the pass must unmask
            # something: at other positions an end token may be held back, or the
            # position may lie behind the span.
            scores[masked[0]] = np.inf
        stop = len(known)
        if masked.size >= options.masked_rows:
            # Round up to a whole number of units from the beginning of the response.
            stop = (masked[options.masked_rows - 1] // unit + 1) * unit
        stretch = masked[(masked >= first_block[0]) & (masked < stop)]
        return stretch[
            np.argsort(-scores[stretch], kind="stable")[: options.masked_rows]
        ]

    def _first_block(self, index: int, first_mask: int) -> tuple[np.ndarray, int]:
        """Response positions of the block of which the next pass has to fill some, and
        the unit in which masks behind it are searched. This is the running block; of
        several running blocks, the leftmost unfinished one.
        """
        spec = self.batch.canvases[index].spec
        layout = spec.layout
        unit = layout.block_length
        window = self.batch.plans[index].window
        start, stop = (place - layout.prompt_length for place in window)
        if spec.schedule.block_add_threshold is not None:
            start = first_mask // unit * unit
            stop = min(start + unit, layout.gen_length)
        positions = np.arange(start, stop)
        if D2CacheOptions.of(spec).range_unit == "masks":
            positions = positions[~self.known_before[index][positions]]
            unit = len(positions)
        return positions, unit


def _most_important(
    importance: np.ndarray, candidates: np.ndarray, share: float
) -> np.ndarray:
    """The most important ``candidates`` (bool ``[canvas_length]``) that together have
    up to ``share`` of the importance of all candidates; at least one."""
    positions = np.flatnonzero(candidates)
    ordered = positions[np.argsort(-importance[positions], kind="stable")]
    shares = importance[ordered].cumsum()
    within = shares <= share * shares[-1:]
    return ordered[: max(np.count_nonzero(within), 1)]
