"""d2Cache (arXiv 2509.23094): each step computes the rows that the step before has
chosen by confidence and attention.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from dllm_engine.cache_methods.base import (
    CacheMethod,
    PassCost,
    hold_canvas,
    plan_on_canvas,
)
from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.option_types import NotNegative, Positive, Share
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import CacheOptions, DecodingSpec
from dllm_engine.decoding.step_plan import Scope, StepPlan


class D2CacheOptions(CacheOptions):
    """Options of ``d2_cache`` (d2Cache, arXiv 2509.23094)."""

    rollout_p: Share = 0.1
    """Share of importance: a step also computes the positions that attention rollout
    finds most important, up to this share of the total importance of the positions that
    it would not compute otherwise, and at least one."""
    masked_rows: Positive = 32
    """Masked positions that a step predicts: the most confident ones near known tokens.
    """
    sigma: float = Field(default=10.0, ge=0.01, le=1e6)
    """Width in tokens of the Gaussian that says how near known tokens are (the
    certainty prior), for choosing masked positions."""
    gap_fill: NotNegative = 0
    """Also compute the rows between two computed rows that are at most so many
    positions apart.
    """
    confidence: Literal["first", "latest"] = "first"
    """Confidence of a masked position that counts: of the first pass, or of the latest
    pass that predicted it.
    """
    range_unit: Literal["masks", "block"] = "masks"
    """Masked positions are searched until ``masked_rows`` are found, and on to the next
    multiple of this: the number of masks in the block, or the length of the block."""

    @property
    def unguided(self) -> str:
        return "cache_method='d2_cache'"


@dataclass(frozen=True)
class Observed:
    """A step whose predictions update the confidences."""

    span: Span
    """Span whose masks are predicted, whether a step may fill them or not."""


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Compute the canvas once, then in each step the rows that the pass before has
    chosen.
    """
    options = D2CacheOptions.of(spec)
    whole = progress.num_forwards == 0
    scope = Scope.ALL if whole else Scope.ACTIVE
    plan = plan_on_canvas(spec, progress, scope, spec.layout.canvas_span)
    # Rows are chosen from the whole canvas, even if a pass fills only a span.
    plan.span = spec.layout.canvas_span
    plan.max_rows = spec.layout.canvas_length
    plan.read = spec.layout.canvas_length
    if spec.unmasking.slow_fast is None:
        # If the schedule needs a certain position, its row may not be among the
        # computed rows.
        plan.quota.candidates = plan.window
    if whole or options.confidence == "latest":
        plan.own = Observed(
            Span(plan.quota.candidates.start, spec.layout.canvas_length)
        )
    if not whole:
        plan.max_rows = _most_rows(options, spec, progress)
    return plan


def _most_rows(options: D2CacheOptions, spec: DecodingSpec, progress: Progress) -> int:
    """Upper bound of the rows that a step computes."""
    predicting = (
        min(options.masked_rows, spec.layout.num_masks - progress.num_unmasked)
        + progress.last_unmasked
    )
    # The most important positions have a larger share of the importance than of the
    # number of positions.
    chosen = predicting + int(options.rollout_p * spec.layout.canvas_length) + 1
    return min(
        chosen + (chosen - 1) * max(options.gap_fill - 1, 0), spec.layout.canvas_length
    )


D2_CACHE = CacheMethod(
    plan,
    hold_canvas,
    D2CacheOptions,
    "dllm_engine.cache_methods.d2_cache.layer_pass:RolloutPass",
    # Four float32 numbers for each row and position: rollout and probabilities of every
    # request, and the same again while a layer is added.
    cost=PassCost(num_bytes=lambda rows, longest: 16 * rows * longest),
)
