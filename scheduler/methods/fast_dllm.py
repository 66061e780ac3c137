"""Fast-dLLM (arXiv 2505.22618): ``prefix`` keeps what lies before the window, ``dual``
everything outside it.

What ``dual`` keeps is refreshed when the window moves: the whole canvas, or that now
and then and less in between. Positions that only whole refreshes renew come first in
pages, and behind them those that every refresh renews.
"""

from collections.abc import Callable
from typing import Literal

from pydantic import Field

from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import Blocks, CacheOptions, DecodingSpec, Span
from dllm_engine.decoding.step_plan import (
    RefreshState,
    Retention,
    Scope,
    StepPlan,
    step_plan,
)
from dllm_engine.scheduler.methods.base import (
    CacheMethod,
    hold_tokens,
    plan_behind_prefix,
    plan_on_canvas,
)

Retain = Callable[[DecodingSpec, Span], tuple[Retention, list[Retention]]]
"""Retained positions of a window: those that only whole refreshes renew, and those that
every refresh renews.
"""


class RefreshOptions(CacheOptions):
    """Options of methods that refresh what they retain when the window moves."""

    refresh: Literal["all", "response", "near"] = "all"
    """Part of the canvas that is computed when the window moves: ``all``, the
    ``response``, or the positions ``near`` the window. ``response`` and ``near`` still
    compute the whole canvas once every ``prompt_refresh_interval`` blocks."""
    prompt_refresh_interval: int = Field(default=4, ge=1)
    """Blocks from one computation of the whole canvas to the next, if ``refresh`` is
    not ``all``.
    """


class DualOptions(RefreshOptions):
    """Options of ``dual`` (Fast-dLLM, arXiv 2505.22618). The defaults
    are the paper's.
    """

    near_tokens: int = Field(default=32, ge=1)
    """Positions on each side of the window that are computed with it, with
    ``refresh="near"``.
    """


def plan_prefix(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """The first step of a window keeps what lies before it; the others compute the
    window and all behind it.
    """
    window = spec.span_of(progress.running)
    start = window.start if progress.step else 0
    return plan_behind_prefix(
        spec, progress, start, spec.visible(window).stop, keep=window.start
    )


def plan_dual(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """The first step of a window keeps all but the window, or with ``refresh="near"``
    renews what is near or the whole canvas; the others compute the window alone."""
    options = DualOptions.of(spec)
    if options.refresh != "near":
        return refresh_then_reuse(spec, progress, 0, retain_all)
    window = spec.span_of(progress.running)
    visible = spec.visible(window)
    state, scope, span = RefreshState.UPDATE, Scope.ACTIVE, window
    if progress.step:
        state = RefreshState.REUSE
    elif whole_is_due(spec, progress, update_step=0):
        scope, span = Scope.ALL, visible
    else:
        # What becomes visible where a suffix is left out has not been computed before.
        stop = (
            window.stop + options.near_tokens
            if spec.suffix_blocks is None
            else visible.stop
        )
        span = Span(max(window.start - options.near_tokens, 0), min(stop, visible.stop))
    return plan_on_canvas(spec, progress, state, scope, span, window_alone=True)


def refresh_then_reuse(
    spec: DecodingSpec, progress: Progress, update_step: int, retain: Retain
) -> StepPlan:
    """Plan of a step since a block joined: ``update_step`` steps that compute what is
    refreshed, one UPDATE that computes it once more and retains tokens, then steps over
    the window alone."""
    window = spec.span_of(progress.running)
    if progress.step > update_step:
        return step_plan(
            spec,
            progress,
            RefreshState.REUSE,
            Scope.ACTIVE,
            window,
            read=progress.retained,
        )
    old, new = retain(spec, window)
    if whole_is_due(spec, progress, update_step):
        span, scope, read, adds, waits = (
            spec.visible(window),
            Scope.ALL,
            0,
            [old, *new],
            RefreshState.FULL,
        )
    else:
        span, scope, read, adds, waits = (
            refreshed(spec, window),
            Scope.ACTIVE,
            old.count,
            new,
            RefreshState.REUSE,
        )
    if progress.step < update_step:
        return step_plan(spec, progress, waits, scope, span, read=read)
    return step_plan(
        spec, progress, RefreshState.UPDATE, scope, span, read=read, adds=adds
    )


def whole_is_due(spec: DecodingSpec, progress: Progress, update_step: int) -> bool:
    """Return True if the whole canvas is refreshed for the running blocks. It is not if
    these blocks and the blocks before them lie in one interval and those had their
    UPDATE."""
    options = RefreshOptions.of(spec)
    if options.refresh == "all" or progress.steps_before <= update_step:
        return True
    first, last = progress.before.first, progress.running.stop - 1
    return (
        first // options.prompt_refresh_interval
        != last // options.prompt_refresh_interval
    )


def refreshed(spec: DecodingSpec, window: Span) -> Span:
    """Span that a refresh computes for a window if the whole canvas is not due."""
    visible = spec.visible(window)
    if RefreshOptions.of(spec).refresh == "all":
        return visible
    # With shifted logits the prompt's last row predicts the first token.
    return Span(max(spec.prompt_length - spec.shifts_logits, 0), visible.stop)


def split(spec: DecodingSpec, window: Span) -> tuple[Span, tuple[Span, Span]]:
    """The positions outside a window that only whole refreshes renew, and those that
    every refresh renews.
    """
    start, stop = refreshed(spec, window)
    return Span(0, start), (Span(start, window.start), Span(window.stop, stop))


def retain_all(spec: DecodingSpec, window: Span) -> tuple[Retention, list[Retention]]:
    """Everything outside the window."""
    old, new = split(spec, window)
    return Retention.whole(old), [Retention.whole(*new)]


def dual_tokens(spec: DecodingSpec, running: Blocks) -> int:
    """Everything outside the window; with ``refresh="near"`` the window too."""
    window = spec.span_of(running)
    kept = spec.visible(window).size
    return kept if DualOptions.of(spec).refresh == "near" else kept - window.size


PREFIX = CacheMethod(
    plan_prefix,
    hold_tokens(lambda spec, running: spec.span_of(running).start),
    trims_suffix=True,
)
DUAL = CacheMethod(
    plan_dual,
    hold_tokens(dual_tokens),
    DualOptions,
    "passes.paged:DualPass",
    trims_suffix=True,
    tuned={"refresh": ("all", "response", "near")},
)
