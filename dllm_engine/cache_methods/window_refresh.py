"""Refreshes of retained tokens when the window moves: of the whole canvas, or mostly of
a part of it.

Positions that only whole refreshes renew come first in pages. Positions that every
refresh renews follow.
"""

from collections.abc import Callable
from typing import Literal

from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.option_types import Positive
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import CacheOptions, DecodingSpec
from dllm_engine.decoding.step_plan import (
    RefreshState,
    Retention,
    Scope,
    StepPlan,
    StepWork,
    step_plan,
)

Retain = Callable[[DecodingSpec, Span, int], tuple[Retention, list[Retention]]]
"""``retain(spec, window, num_shared)``: retained positions of a window, after a shared
beginning of the prompt: first positions that only whole refreshes renew, then positions
that every refresh renews.
"""


class RefreshOptions(CacheOptions):
    """Options of methods that refresh retained tokens when the window moves."""

    refresh: Literal["all", "response", "near"] = "all"
    """Part of the canvas that is computed when the window moves: ``all``, the
    ``response``, or the positions ``near`` the window. ``response`` and ``near`` still
    compute the whole canvas once every ``prompt_refresh_interval`` blocks."""
    prompt_refresh_interval: Positive = 4
    """Blocks from one computation of the whole canvas to the next, if ``refresh`` is
    not ``all``.
    """


def refresh_then_reuse(
    spec: DecodingSpec, progress: Progress, update_step: int, retain: Retain
) -> StepPlan:
    """Plan the next step after a block has joined: first ``update_step`` steps that
    compute the refreshed span, then one UPDATE that computes it again and retains
    tokens, then steps that compute only the window."""
    window = progress.window(spec)
    if progress.step > update_step:
        read = progress.retained
        work = StepWork(RefreshState.REUSE, Scope.ACTIVE, window, read=read)
        return step_plan(spec, progress, work)
    num_shared = progress.num_shared
    old, new = retain(spec, window, num_shared)
    if whole_is_due(spec, progress, update_step):
        span = Span(num_shared, spec.layout.visible(window).stop)
        read = num_shared
        adds = [old, *new]
    else:
        span = refreshed(spec, window, num_shared)
        read = num_shared + old.count
        adds = [*new]
    if read:
        work = StepWork(RefreshState.REUSE, Scope.ACTIVE, span, read=read)
    else:
        work = StepWork(RefreshState.FULL, Scope.ALL, span)
    if progress.step == update_step:
        work = work._replace(state=RefreshState.UPDATE, adds=adds)
    return step_plan(spec, progress, work)


def whole_is_due(spec: DecodingSpec, progress: Progress, update_step: int) -> bool:
    """Return True if the whole canvas is refreshed for the running blocks. It is not
    refreshed if the blocks before them are in the same interval and had their UPDATE.
    """
    options = RefreshOptions.of(spec)
    if options.refresh == "all" or progress.steps_before <= update_step:
        return True
    first = progress.before.first
    last = progress.running.stop - 1
    return (
        first // options.prompt_refresh_interval
        != last // options.prompt_refresh_interval
    )


def refreshed(spec: DecodingSpec, window: Span, num_shared: int) -> Span:
    """Span that a refresh computes for a window if it is not the whole canvas."""
    stop = spec.layout.visible(window).stop
    if RefreshOptions.of(spec).refresh == "all":
        return Span(num_shared, stop)
    # With shifted logits the prompt's last row predicts the first token.
    start = spec.layout.prompt_length - spec.layout.shifts_logits
    return Span(max(start, num_shared), stop)


def split(
    spec: DecodingSpec, window: Span, num_shared: int
) -> tuple[Span, tuple[Span, Span]]:
    """Positions outside a window that only whole refreshes renew, and positions that
    every refresh renews.
    """
    start, stop = refreshed(spec, window, num_shared)
    return Span(num_shared, start), (Span(start, window.start), Span(window.stop, stop))
