"""FreeCache (arXiv 2505.21467, section 3.2.1): the prompt and finished blocks are computed once."""

from dllm_engine.scheduler.methods.base import LAUNCHES_TO_RETAIN, CacheMethod, hold_tokens, tokens_before
from dllm_engine.scheduler.request import CacheOptions, DecodingSpec, Progress, Span
from dllm_engine.scheduler.step_plan import RefreshState, Scope, StepPlan, step_plan


class FreeCacheOptions(CacheOptions):
    """Options of ``freecache`` (FreeCache, arXiv 2505.21467, section 3.2.1)."""

    include_suffix: bool = True
    """Compute the masked tokens behind the block in every step too. False: the block alone."""


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """The first step computes the whole canvas and keeps the prompt. A finished block is fed once more, with its final
    tokens, in the first step of the next one, which keeps it; its last row then predicts that block's first position
    where logits are shifted.
    """
    options = spec.cache
    assert isinstance(options, FreeCacheOptions)
    block, clean = spec.block_span(progress.block), tokens_before(spec, progress.block)
    stop = spec.canvas_length if options.include_suffix else block.stop
    if progress.step > 0:
        span = Span(block.start, stop)
        return step_plan(spec, progress, RefreshState.REUSE, Scope.ACTIVE, span, read=clean, retained=clean)
    if progress.block == 0:
        return step_plan(spec, progress, RefreshState.UPDATE, Scope.ALL, spec.canvas_span, retained=clean)
    clean_before = tokens_before(spec, progress.block - 1)
    span = Span(clean_before, stop)
    return step_plan(spec, progress, RefreshState.UPDATE, Scope.ACTIVE, span, read=clean_before, retained=clean)


FREECACHE = CacheMethod(
    plan, hold_tokens(tokens_before), FreeCacheOptions, recordable=True, launches=LAUNCHES_TO_RETAIN
)
