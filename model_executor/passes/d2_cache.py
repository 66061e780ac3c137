"""d2Cache (arXiv 2509.23094): K/V of the whole canvas are kept by position, and a pass ends by choosing the rows of the
next one.

These are rows that predict masked positions, by their confidence and the certainty prior; the tokens that were just
unmasked; and of all others those to which attention, rolled out over the layers, leads.
"""

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

from dllm_engine.kernels.paged_attention import paged_attention
from dllm_engine.kernels.voting import summed_probabilities
from dllm_engine.model_executor.batch_tables import TokenTables
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import LayerPass
from dllm_engine.model_executor.step_batch import Canvas, StepBatch, ranges
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.certainty import certainty_density
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics
from dllm_engine.scheduler.methods.d2_cache import D2CacheOptions
from dllm_engine.scheduler.request import DecodingSpec, Span
from dllm_engine.scheduler.unmasking_policies import UNMASKING_POLICIES, WEIGHTED_MEASURES


class Rollout:
    """Attention rollout of one request: R = I, then with each layer R ← ½ (Â + I) R.

    Â holds the layer's attention probabilities, averaged over heads, in the computed rows, and unit rows elsewhere. So
    all other rows of R stay unit rows, and the computed ones are enough: float32 ``[num_rows, canvas_length]``.
    """

    def __init__(self, positions: torch.Tensor, canvas_length: int) -> None:
        """``positions``: of the computed rows, ``[num_rows]``."""
        self.positions = positions
        self.rows = torch.zeros(positions.shape[0], canvas_length, device=positions.device)
        self.rows.scatter_(1, positions[:, None], 1.0)

    def add_layer(self, probabilities: torch.Tensor) -> None:
        """``probabilities`` ``[num_rows, canvas_length]``: averaged over heads; overwritten."""
        computed_columns = probabilities[:, self.positions]
        probabilities[:, self.positions] = 0
        self.rows = self.rows.addmm(computed_columns, self.rows).add_(probabilities).mul_(0.5)

    def importance(self) -> torch.Tensor:
        """Column sums of R, float32 ``[canvas_length]``."""
        return self.rows.sum(dim=0).add_(1).index_add_(0, self.positions, -torch.ones_like(self.rows[:, 0]))


class RolloutPass(LayerPass):
    """K/V of every computed row replace those kept at its position, and the row attends to the whole canvas as kept."""

    observes = True

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        self.batch, self.pages = batch, pages
        device = batch.device
        lengths = [canvas.spec.canvas_length for canvas in batch.canvases]
        self.tables = TokenTables(batch, pages, lengths)
        self.row_slots = self.tables.row_slots()
        self.requests, self.tokens = on_device(np.stack(ranges([0] * len(lengths), lengths)), device).unbind()
        """Request and token of every position of every canvas, canvas by canvas."""
        self.lengths = lengths
        self.rollouts = [Rollout(batch.positions[batch.rows(i)], length) for i, length in enumerate(lengths)]
        self.known_before = [canvas.known[canvas.spec.prompt_length :] >= 0 for canvas in batch.canvases]
        """Tokens of each response that are known when the pass begins, bool."""
        for canvas, length in zip(batch.canvases, lengths, strict=True):
            if canvas.cache_state is None:
                canvas.cache_state = torch.zeros(length, device=device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.pages.write(k, v, self.row_slots[layer])
        tokens = self.tables.paged_tokens(layer)
        bounds, longest = self.batch.cu_seqlens, self.batch.max_seqlen
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        out = paged_attention(q, k, v, bounds, tokens, attend_fresh=False, max_seqlen=longest, lse=lse)
        slots = self.tables.token_slots(layer, self.requests, self.tokens)
        per_page = self.pages.keys.shape[1]
        keys = self.pages.keys[slots // per_page, slots % per_page].split(self.lengths)
        rows = [self.batch.rows(i) for i in range(len(self.lengths))]
        sums = [
            summed_probabilities(q[r], request_values, lse[r]) for r, request_values in zip(rows, keys, strict=True)
        ]
        ranks = get_tensor_model_parallel_world_size()
        if ranks > 1:
            # Every rank has its own heads; all must choose the same rows.
            flat = tensor_model_parallel_all_reduce(torch.cat([x.flatten() for x in sums]))
            sums = [x.view_as(y) for x, y in zip(flat.split([x.numel() for x in sums]), sums, strict=True)]
        for rollout, request_values in zip(self.rollouts, sums, strict=True):
            rollout.add_layer(request_values.div_(q.shape[1] * ranks))
        return out

    def observe(self, index: int, positions: torch.Tensor, statistics: TokenStatistics) -> None:
        canvas, plan = self.batch.canvases[index], self.batch.plans[index]
        if plan.predicts is not None:
            measure = UNMASKING_POLICIES[canvas.spec.unmasking].measures
            confidence = statistics.confidence(measure if measure in WEIGHTED_MEASURES else "probability")
            canvas.cache_state[positions] = confidence.float()

    def asked(self) -> list[torch.Tensor]:
        """Importance and confidence of every position, per request."""
        pairs = zip(self.rollouts, self.batch.canvases, strict=True)
        return [torch.stack((rollout.importance(), canvas.cache_state)) for rollout, canvas in pairs]

    def next_rows(self, index: int) -> np.ndarray | None:
        canvas = self.batch.canvases[index]
        if (canvas.known >= 0).all():
            return None
        importance, confidence = self.answers[index].astype(np.float64)
        window = self.batch.plans[index].window
        return choose_rows(canvas, window, self.known_before[index], confidence, importance)


def choose_rows(
    canvas: Canvas, window: Span, known_before: np.ndarray, confidence: np.ndarray, importance: np.ndarray
) -> np.ndarray:
    """The rows of a request's next pass, ascending.

    Args:
        window: of the pass that ends.
        known_before: bool ``[gen_length]``; which tokens of the response were known when it began.
        confidence, importance: float64 ``[canvas_length]``, by position.
    """
    spec = canvas.spec
    options, start, shift = D2CacheOptions.of(spec), spec.prompt_length, int(spec.shifts_logits)
    chosen = start + _masked_to_predict(spec, window, known_before, canvas.known[start:] >= 0, confidence[start:])
    computed = np.zeros(spec.canvas_length, dtype=bool)
    computed[np.maximum(chosen - shift, 0)] = True
    # The prompt's last row, which predicts the first token, has no say in what rollout chooses.
    last_of_prompt = start - 1 if shift and start else None
    predicts_first = last_of_prompt is not None and computed[last_of_prompt]
    if last_of_prompt is not None:
        computed[last_of_prompt] = False
    computed[canvas.last_unmasked] = True
    computed[_most_important(importance, ~computed, options.rollout_p)] = True
    if last_of_prompt is not None:
        computed[last_of_prompt] = predicts_first
    rows = np.flatnonzero(computed)
    near = np.flatnonzero(np.diff(rows) <= options.gap_fill)
    for i in near:
        computed[rows[i] : rows[i + 1]] = True
    return np.flatnonzero(computed)


def _masked_to_predict(
    spec: DecodingSpec, window: Span, known_before: np.ndarray, known: np.ndarray, confidence: np.ndarray
) -> np.ndarray:
    """The masked positions of the response that the next pass is to predict."""
    options = D2CacheOptions.of(spec)
    masked = np.flatnonzero(~known)
    first, unit, preferred = _range(spec, window, known_before, masked[0])
    scores = confidence * certainty_density(known, options.sigma)
    scores[preferred] += scores.max()
    if spec.delay_eos or spec.slow_fast is not None:
        # Elsewhere an end token may be held back, or lie behind the span; the pass must unmask something.
        scores[masked[0]] = np.inf
    enough = masked[min(options.masked_rows, masked.size) - 1]
    stop = len(known) if masked.size < options.masked_rows else (enough // unit + 1) * unit
    within = masked[(masked >= first) & (masked < stop)]
    return within[np.argsort(-scores[within], kind="stable")[: options.masked_rows]]


def _range(
    spec: DecodingSpec, window: Span, known_before: np.ndarray, first_masked: int
) -> tuple[int, int, np.ndarray]:
    """Range that masked positions are chosen from, in positions of the response: its first; a number of which its end
    is a multiple; and the positions that come before all others. These are in the block that the pass worked on; of
    several at once the leftmost that is not finished, because the next pass has to fill some of it."""
    start, stop = window.start - spec.prompt_length, window.stop - spec.prompt_length
    if spec.block_add_threshold is not None:
        start = first_masked // spec.block_length * spec.block_length
        stop = min(start + spec.block_length, spec.gen_length)
    if D2CacheOptions.of(spec).range_unit == "block":
        return start, spec.block_length, np.arange(start, stop)
    preferred = start + np.flatnonzero(~known_before[start:stop])
    return int(preferred[0]), len(preferred), preferred


def _most_important(importance: np.ndarray, candidates: np.ndarray, share: float) -> np.ndarray:
    """Positions among ``candidates`` ``[canvas_length]`` bool that make up ``share`` of their importance; at least
    one."""
    positions = np.flatnonzero(candidates)
    ordered = positions[np.argsort(-importance[positions], kind="stable")]
    shares = importance[ordered].cumsum()
    within = shares <= share * shares[-1] if ordered.size else np.zeros(0, dtype=bool)
    return ordered[: max(int(within.sum()), 1)]
