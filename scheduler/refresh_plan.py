"""Refresh plans: what each cache method computes at each denoising step, and what it retains.

A plan is a pure function of a request's settings and progress; it knows no tensors and no tokens. Where the rows of a
step depend on tokens the plan is symbolic (``RowRule``) with an upper bound, and the model runner resolves it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from dllm_engine.options import EngineOptions, SparseOptions
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
    threshold: float | None = None
    """Unmask every candidate whose probability reaches this, at least one, instead of ``count``; for policies whose
    confidence is a probability."""


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
    retained: int = 0
    """Tokens per layer that an UPDATE step writes into pages, and that a REUSE step reads."""


RefreshPlan = Callable[[DecodingSpec, Progress], StepPlan]


def unmask_quota(spec: DecodingSpec, progress: Progress, in_blocks: bool) -> UnmaskQuota:
    """Tokens to unmask at this step, by the family's schedule (LLaDA's uniform, Dream's time grid).

    ``in_blocks``: Dream's first step of a block fills its first position only, outside the time grid, because with
    shifted logits that position is the one a block-only forward cannot predict (Fast-dLLM, Sparse-dLLM).
    """
    block = spec.block_span(progress.block)
    steps = spec.steps_in_block(progress.block)
    if spec.schedule == "timestep" and in_blocks and progress.step == 0 and steps != 1:
        return UnmaskQuota(Span(block.start, block.start + 1), 1, 1.0)
    if progress.step >= steps - 1:
        return UnmaskQuota(block, progress.num_masked, 1.0, spec.threshold)
    if spec.schedule == "uniform":
        count = uniform_count(block.size, steps, progress.step)
        return UnmaskQuota(block, count, count / max(progress.num_masked, 1), spec.threshold)
    return UnmaskQuota(
        block,
        timestep_count(progress.num_masked, steps, progress.step),
        timestep_ratio(steps, progress.step),
        spec.threshold,
    )


def _plan(
    spec: DecodingSpec, progress: Progress, state: RefreshState, span: Span, *, in_blocks: bool = True
) -> StepPlan:
    return StepPlan(
        state=state,
        rows=RowRule.ALL,
        span=span,
        max_rows=span.size,
        block=spec.block_span(progress.block),
        quota=unmask_quota(spec, progress, in_blocks),
        forward=progress.num_forwards,
    )


def plan_none(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """No cache: every step is FULL."""
    return _plan(spec, progress, RefreshState.FULL, spec.canvas_span, in_blocks=spec.num_blocks > 1)


def plan_prefix(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Fast-dLLM's prefix cache: a block's first step keeps what lies before it, the others compute all from it on."""
    block = spec.block_span(progress.block)
    if progress.step == 0:
        plan = _plan(spec, progress, RefreshState.UPDATE, spec.canvas_span)
    else:
        plan = _plan(spec, progress, RefreshState.REUSE, Span(block.start, spec.canvas_length))
    return replace(plan, retained=retained_prefix(spec, progress.block))


def plan_dual(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Fast-dLLM's dual cache: a block's first step keeps all but the block, the others compute the block alone."""
    return _plan_eviction(spec, progress, update_step=0, retained=retained_dual(spec, progress.block))


def plan_sparse(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Sparse-dLLM, Algorithm 4: ``update_delay`` FULL steps, one UPDATE that evicts, then the block alone."""
    assert isinstance(spec.cache, SparseOptions)
    return _plan_eviction(spec, progress, spec.cache.update_delay, retained_sparse(spec, progress.block))


def _plan_eviction(spec: DecodingSpec, progress: Progress, update_step: int, retained: int) -> StepPlan:
    if progress.step < update_step:
        return _plan(spec, progress, RefreshState.FULL, spec.canvas_span)
    if progress.step == update_step:
        plan = _plan(spec, progress, RefreshState.UPDATE, spec.canvas_span)
    else:
        plan = _plan(spec, progress, RefreshState.REUSE, spec.block_span(progress.block))
    return replace(plan, retained=retained)


def retained_prefix(spec: DecodingSpec, block: int) -> int:
    """Tokens before the block."""
    return spec.block_span(block).start


def retained_dual(spec: DecodingSpec, block: int) -> int:
    """Tokens outside the block."""
    return spec.canvas_length - spec.block_span(block).size


def retained_sparse(spec: DecodingSpec, block: int) -> int:
    """The retention ratio of the candidates, rounded down; with ``scope="prefix"`` the suffix is kept whole."""
    options = spec.cache
    assert isinstance(options, SparseOptions)
    start, stop = spec.block_span(block)
    suffix = spec.canvas_length - stop
    if options.scope == "prefix":
        return int(start * options.retention_ratio) + suffix
    return int((start + suffix) * options.retention_ratio)


REFRESH_PLANS: dict[str, RefreshPlan] = {
    "none": plan_none,
    "prefix": plan_prefix,
    "dual": plan_dual,
    "sparse": plan_sparse,
}
RETAINED_TOKENS: dict[str, Callable[[DecodingSpec, int], int]] = {
    "none": lambda spec, block: 0,
    "prefix": retained_prefix,
    "dual": retained_dual,
    "sparse": retained_sparse,
}
"""Tokens per layer that a request holds in pages during a block; known before it runs, so pages can be reserved."""


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages of ``page_size`` tokens that hold ``num_tokens`` of one layer."""
    return -(-num_tokens // page_size)


def page_demand(spec: DecodingSpec, options: EngineOptions, num_layers: int) -> int:
    """The most pages a request holds at any time of its life, over all layers."""
    retained_tokens = RETAINED_TOKENS[options.cache_method]
    most = max(retained_tokens(spec, block) for block in range(spec.num_blocks))
    return num_layers * pages_for(most, options.page_size)
