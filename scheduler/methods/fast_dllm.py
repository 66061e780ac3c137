"""Fast-dLLM (arXiv 2505.22618): ``prefix`` keeps what lies before the window, ``dual`` everything outside it."""

from dataclasses import replace

from pydantic import Field

from dllm_engine.scheduler.methods.base import CacheMethod, hold_tokens, tokens_before
from dllm_engine.scheduler.methods.window_refresh import (
    RefreshOptions,
    hold_retained,
    refresh_then_reuse,
    split,
    whole_is_due,
)
from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import DecodingSpec, Span
from dllm_engine.scheduler.step_plan import RefreshState, Retention, Scope, StepPlan, cut, step_plan


class DualOptions(RefreshOptions):
    """Options of ``dual`` (Fast-dLLM, arXiv 2505.22618). The defaults are the paper's."""

    near_tokens: int = Field(default=32, ge=1)
    """Positions on each side of the window that are computed with it, with ``refresh="near"``."""


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
    options = DualOptions.of(spec)
    if options.refresh == "near":
        return _plan_near(spec, progress, options.near_tokens)
    return refresh_then_reuse(spec, progress, 0, retain_all)


def _plan_near(spec: DecodingSpec, progress: Progress, near_tokens: int) -> StepPlan:
    """Every position is kept, as the last step left it that computed it: the first step of a window renews what is
    near, or the whole canvas, and the others renew the window."""
    window = spec.span_of(progress.running)
    kept = span = spec.visible(window)
    state, scope = RefreshState.UPDATE, Scope.ALL
    if progress.step:
        state, scope, span = RefreshState.REUSE, Scope.ACTIVE, window
    elif not whole_is_due(spec, progress, update_step=0):
        # What becomes visible where a suffix is left out has not been computed before.
        stop = window.stop + near_tokens if spec.suffix_blocks is None else kept.stop
        scope, span = Scope.ACTIVE, Span(max(window.start - near_tokens, 0), min(stop, kept.stop))
    read = cut(progress, kept).stop
    plan = step_plan(spec, progress, state, scope, span, read=read)
    return plan if read == kept.stop else replace(plan, retained=kept.stop)


def retain_all(spec: DecodingSpec, window: Span) -> tuple[list[Retention], list[Retention]]:
    """Everything outside the window; with ``refresh="near"`` the window too."""
    if DualOptions.of(spec).refresh == "near":
        return [Retention.whole(spec.visible(window))], []
    old, new = split(spec, window)
    return [Retention.whole(*old)], [Retention.whole(*new)]


PREFIX = CacheMethod(plan_prefix, hold_tokens(tokens_before), trims_suffix=True)
DUAL = CacheMethod(
    plan_dual,
    hold_retained(retain_all),
    DualOptions,
    "passes.paged:dual_pass",
    trims_suffix=True,
    tuned={"refresh": ("all", "response", "near")},
)
