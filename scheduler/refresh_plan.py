"""Refresh plans: what each cache method computes at each denoising step.

A plan is a pure function of a request's settings and progress; it knows no tensors and no tokens. Where the rows of a
step depend on tokens the plan is symbolic (``RowRule``) with an upper bound, and the model runner resolves it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from dllm_engine.scheduler.decoding import DecodingSpec, Progress, Span
from dllm_engine.scheduler.unmask_schedule import timestep_count, timestep_ratio, uniform_count


class RefreshState(Enum):
    """What a step does with a request's cache."""

    FULL = "full"
    """Compute the whole canvas; the cache is untouched."""
    UPDATE = "update"
    """Recompute the rows and write what is retained into pages."""
    REUSE = "reuse"
    """Compute the active rows only; everything else comes from pages."""


class RowRule(Enum):
    """Which rows of ``StepPlan.span`` are computed."""

    ALL = "all"


@dataclass(frozen=True)
class UnmaskQuota:
    """How many of the masked positions in ``candidates`` a step unmasks."""

    candidates: Span
    count: int
    ratio: float
    """``count`` as a share of the masked candidates, for policies that draw each position by itself (``origin``)."""


@dataclass(frozen=True)
class StepPlan:
    """One denoising step of one request."""

    state: RefreshState
    rows: RowRule
    span: Span
    """Canvas positions that ``rows`` selects from."""
    max_rows: int
    """Upper bound on the rows computed; what the token budget is charged."""
    block: Span
    quota: UnmaskQuota
    forward: int
    """Number of this forward pass over the whole response, from 0; also the counter of its random numbers."""
    last_in_block: bool
    """Whatever is still masked in the block after this step is unmasked by it."""


RefreshPlan = Callable[[DecodingSpec, Progress], StepPlan]


def unmask_quota(spec: DecodingSpec, progress: Progress) -> UnmaskQuota:
    """Tokens to unmask at this step, by the family's schedule (LLaDA's uniform, Dream's time grid).

    Dream in blocks: the first step of a block fills its first position only, outside the time grid, because with
    shifted logits that position is the one a block-only forward cannot predict (Fast-dLLM, Sparse-dLLM).
    """
    block = spec.block_span(progress.block)
    steps = spec.steps_in_block(progress.block)
    if progress.step >= steps - 1:
        return UnmaskQuota(block, progress.num_masked, 1.0)
    if spec.schedule == "uniform":
        count = uniform_count(block.size, steps, progress.step)
        return UnmaskQuota(block, count, count / max(progress.num_masked, 1))
    if progress.step == 0 and spec.num_blocks > 1:
        return UnmaskQuota(Span(block.start, block.start + 1), 1, 1.0)
    return UnmaskQuota(
        block, timestep_count(progress.num_masked, steps, progress.step), timestep_ratio(steps, progress.step)
    )


def plan_none(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """No cache: every step is FULL."""
    canvas = Span(0, spec.canvas_length)
    return StepPlan(
        state=RefreshState.FULL,
        rows=RowRule.ALL,
        span=canvas,
        max_rows=canvas.size,
        block=spec.block_span(progress.block),
        quota=unmask_quota(spec, progress),
        forward=progress.num_forwards,
        last_in_block=progress.step >= spec.steps_in_block(progress.block) - 1,
    )


REFRESH_PLANS: dict[str, RefreshPlan] = {"none": plan_none}
