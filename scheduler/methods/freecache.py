"""FreeCache (arXiv 2505.21467, section 3.2.1): the prompt and finished blocks are computed once."""

from dllm_engine.scheduler.methods.base import LAUNCHES_TO_RETAIN, CacheMethod, hold_tokens, tokens_before
from dllm_engine.scheduler.request import CacheOptions, DecodingSpec, Progress, Span
from dllm_engine.scheduler.step_plan import RefreshState, Retention, Scope, StepPlan, step_plan


class FreeCacheOptions(CacheOptions):
    """Options of ``freecache`` (FreeCache, arXiv 2505.21467, section 3.2.1)."""

    include_suffix: bool = True
    """Compute the masked tokens behind the window in every step too. False: the window alone."""


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """The first step computes the whole canvas and keeps the prompt. A finished block is fed once more, with its final
    tokens, when it has left the window: the first step after that keeps it. Its last row then predicts the window's
    first position where logits are shifted.
    """
    options = spec.cache
    assert isinstance(options, FreeCacheOptions)
    window, clean = spec.span_of(progress.running), tokens_before(spec, progress.running)
    visible = spec.visible(window)
    stop = visible.stop if options.include_suffix else window.stop
    if progress.num_forwards == 0:
        kept = Retention.whole(Span(0, clean))
        return step_plan(spec, progress, RefreshState.UPDATE, Scope.ALL, visible, adds=[kept])
    clean_before = tokens_before(spec, progress.before) if progress.step == 0 else clean
    if clean_before < clean:
        span, finished = Span(clean_before, stop), Retention.whole(Span(clean_before, clean))
        return step_plan(spec, progress, RefreshState.UPDATE, Scope.ACTIVE, span, read=clean_before, adds=[finished])
    span = Span(window.start, stop)
    return step_plan(spec, progress, RefreshState.REUSE, Scope.ACTIVE, span, read=clean)


FREECACHE = CacheMethod(
    plan,
    hold_tokens(tokens_before),
    FreeCacheOptions,
    trims_suffix=True,
    recordable=True,
    launches=LAUNCHES_TO_RETAIN,
    tuned={"include_suffix": (True, False)},
)
