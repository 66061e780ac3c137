"""Fast-dLLM (arXiv 2505.22618): ``prefix`` keeps what lies before the window, ``dual`` everything outside it."""

from dllm_engine.scheduler.methods.base import (
    LAUNCHES_TO_RETAIN,
    CacheMethod,
    evict_then_reuse,
    hold_tokens,
    tokens_before,
    tokens_outside,
)
from dllm_engine.scheduler.request import DecodingSpec, Progress, Span
from dllm_engine.scheduler.step_plan import RefreshState, Scope, StepPlan, step_plan


def plan_prefix(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """The first step of a window keeps what lies before it; the others compute the window and all behind it."""
    retained = tokens_before(spec, progress.running)
    if progress.step == 0:
        return step_plan(spec, progress, RefreshState.UPDATE, Scope.ALL, spec.canvas_span, retained=retained)
    span = Span(spec.span_of(progress.running).start, spec.canvas_length)
    return step_plan(spec, progress, RefreshState.REUSE, Scope.ACTIVE, span, read=retained, retained=retained)


def plan_dual(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """The first step of a window keeps all but the window; the others compute the window alone."""
    return evict_then_reuse(spec, progress, update_step=0, retained=tokens_outside(spec, progress.running))


PREFIX = CacheMethod(plan_prefix, hold_tokens(tokens_before), recordable=True, launches=LAUNCHES_TO_RETAIN)
DUAL = CacheMethod(plan_dual, hold_tokens(tokens_outside), recordable=True, launches=LAUNCHES_TO_RETAIN)
