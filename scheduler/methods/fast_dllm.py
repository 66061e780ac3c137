"""Fast-dLLM (arXiv 2505.22618): ``prefix`` keeps what lies before the window, ``dual`` everything outside it."""

from dllm_engine.scheduler.methods.base import LAUNCHES_TO_RETAIN, CacheMethod, hold_tokens, tokens_before
from dllm_engine.scheduler.methods.window_refresh import (
    RefreshOptions,
    hold_retained,
    refresh_then_reuse,
    split,
)
from dllm_engine.scheduler.request import DecodingSpec, Progress, Span
from dllm_engine.scheduler.step_plan import RefreshState, Retention, Scope, StepPlan, step_plan


class DualOptions(RefreshOptions):
    """Options of ``dual`` (Fast-dLLM, arXiv 2505.22618). The defaults are the paper's."""


def plan_prefix(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """The first step of a window keeps what lies before it; the others compute the window and all behind it."""
    window = spec.span_of(progress.running)
    visible = spec.visible(window)
    if progress.step == 0:
        before = Retention.whole(Span(0, window.start))
        return step_plan(spec, progress, RefreshState.UPDATE, Scope.ALL, visible, adds=[before])
    span = Span(window.start, visible.stop)
    return step_plan(spec, progress, RefreshState.REUSE, Scope.ACTIVE, span, read=window.start)


def plan_dual(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """The first step of a window keeps all but the window; the others compute the window alone."""
    return refresh_then_reuse(spec, progress, 0, retain_all)


def retain_all(spec: DecodingSpec, window: Span) -> tuple[list[Retention], list[Retention]]:
    """Everything outside the window."""
    old, new = split(spec, window)
    return [Retention.whole(*old)], [Retention.whole(*new)]


PREFIX = CacheMethod(
    plan_prefix, hold_tokens(tokens_before), trims_suffix=True, recordable=True, launches=LAUNCHES_TO_RETAIN
)
DUAL = CacheMethod(
    plan_dual,
    hold_retained(retain_all),
    DualOptions,
    trims_suffix=True,
    recordable=True,
    launches=LAUNCHES_TO_RETAIN,
    tuned={"refresh": ("all", "response", "near")},
)
