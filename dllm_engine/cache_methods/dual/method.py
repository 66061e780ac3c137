"""Fast-dLLM (arXiv 2505.22618), DualCache: everything outside the window is kept."""

from typing import ClassVar

from dllm_engine.cache_methods.base import CacheMethod, hold_tokens, plan_on_canvas
from dllm_engine.cache_methods.window_refresh import (
    RefreshOptions,
    refresh_then_reuse,
    split,
    whole_is_due,
)
from dllm_engine.decoding.canvas_layout import Blocks, Span
from dllm_engine.decoding.option_types import Positive
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec, TunedValues
from dllm_engine.decoding.step_plan import RefreshState, Retention, Scope, StepPlan


class DualOptions(RefreshOptions):
    """Options of ``dual`` (Fast-dLLM, arXiv 2505.22618). The defaults are the paper's."""

    tuned: ClassVar[TunedValues] = {"refresh": ("all", "response", "near")}

    near_tokens: Positive = 32
    """Positions on each side of the window that are computed with it, with
    ``refresh="near"``.
    """


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """The first step of a window keeps everything but the window, or with
    ``refresh="near"`` renews near positions or the whole canvas. Other steps compute
    only the window."""
    options = DualOptions.of(spec)
    if options.refresh != "near":
        return refresh_then_reuse(spec, progress, 0, retain_all)
    window = progress.window(spec)
    visible = spec.layout.visible(window)
    state, scope, span = RefreshState.UPDATE, Scope.ACTIVE, window
    if progress.step:
        state = RefreshState.REUSE
    elif whole_is_due(spec, progress, update_step=0):
        span = Span(progress.num_shared, visible.stop)
        scope = Scope.ACTIVE if span.start else Scope.ALL
    else:
        # If a suffix is left out, newly visible positions have not been computed
        # before.
        stop = (
            window.stop + options.near_tokens
            if spec.layout.suffix_blocks is None
            else visible.stop
        )
        start = max(window.start - options.near_tokens, progress.num_shared)
        span = Span(start, min(stop, visible.stop))
    return plan_on_canvas(spec, progress, scope, span, state=state, window_alone=True)


def retain_all(
    spec: DecodingSpec, window: Span, num_shared: int
) -> tuple[Retention, list[Retention]]:
    """All positions outside the window."""
    old, new = split(spec, window, num_shared)
    return Retention.whole(old), [Retention.whole(*new)]


def num_retained(spec: DecodingSpec, running: Blocks) -> int:
    """Everything outside the window; with ``refresh="near"`` the window too."""
    window = spec.layout.span_of(running)
    kept = spec.layout.visible(window).size
    return kept if DualOptions.of(spec).refresh == "near" else kept - window.size


DUAL = CacheMethod(
    plan,
    hold_tokens(num_retained),
    DualOptions,
    "dllm_engine.cache_methods.dual.layer_pass:DualPass",
    trims_suffix=True,
    shares_prompts=True,
)
