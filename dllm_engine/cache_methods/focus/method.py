"""FOCUS (arXiv 2601.23278): block diffusion whose passes feed a decided token only once
more, and drop masked rows that they do not expect to decode.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from dllm_engine.cache_methods.base import CacheMethod, hold_tokens
from dllm_engine.cache_methods.finished_blocks import (
    plan_blocks,
    shorten,
    through_block,
)
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import CacheOptions, DecodingSpec, TunedValues
from dllm_engine.decoding.step_plan import RefreshState, StepPlan


class FocusOptions(CacheOptions):
    """Options of ``focus`` (FOCUS, arXiv 2601.23278). ``k`` is the number of masked rows
    that a pass keeps at least.
    """

    alpha: float = Field(default=1.5, ge=-16, le=16)
    """α: ``k`` is this many times the mean number of tokens filled by a pass of the
    block, rounded up. 0 or less: ``k`` stays ``keep``.
    """
    keep: int = Field(default=1, ge=1)
    """``k`` in the first pass of a response."""
    select: Literal["dynamic", "top", "none"] = "dynamic"
    """Masked rows that a pass keeps. ``dynamic``: those whose importance rises more than
    the mean and a standard deviation, at least ``k``; ``top``: ``k``; ``none``: all, so
    that only decided tokens leave the block.
    """
    first_keep: Literal["carry", "alpha"] = "carry"
    """``k`` in the first pass of a block. ``carry``: as the block before left it (the
    authors' evaluation); ``alpha``: as after a token per pass (their servers).
    """
    deviation: Literal["sample", "population"] = "sample"
    """Standard deviation: over n − 1 (the authors' evaluation), or n (their servers)."""

    tuned: ClassVar[TunedValues] = {"alpha": (1.2, 1.5, 1.8)}

    @property
    def keeps_running_block(self) -> bool:
        return True

    @property
    def unguided(self) -> str | None:
        return "cache_method='focus'"

    def refusal(self, spec: DecodingSpec) -> str | None:
        if spec.layout.shifts_logits:
            return (
                "cache_method='focus' keeps rows by the position that they predict, "
                "which this model's do not; use cache_method='block'"
            )
        if spec.unmasking.edit_threshold is None:
            return None
        return (
            "cache_method='focus' feeds a decided token once, and edit_threshold "
            "changes tokens later; leave edit_threshold unset, or use "
            "cache_method='block'"
        )


@dataclass(frozen=True)
class FocusStep:
    """The part of a step plan that is specific to FOCUS."""

    begins_block: bool
    """True if every row of the block is fed."""


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Plan a step of block diffusion. A decision keeps all rows, because its few passes
    need the probabilities of all rows.
    """
    plan = plan_blocks(spec, progress)
    begins_block = progress.step == 0 or bool(plan.adds)
    if begins_block:
        plan.state = RefreshState.UPDATE
    if spec.decision is None:
        plan.own = FocusStep(begins_block)
        plan.quota.may_fall_short = FocusOptions.of(spec).select != "none"
    return plan


FOCUS = CacheMethod(
    plan,
    hold_tokens(through_block),
    FocusOptions,
    "dllm_engine.cache_methods.focus.layer_pass:FocusPass",
    attention=("block_causal",),
    shortened=shorten,
    keeps_for_good=True,
)
