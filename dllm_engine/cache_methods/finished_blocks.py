"""Steps of methods that keep finished blocks, whose keys and values are exact where
attention goes by blocks.

A block is finished when none of its tokens can change. With token editing, a step
that begins without masks keeps its block as well: if it replaces no token, what it
has kept is final, and the next block feeds that no more.
"""

from dataclasses import replace

from dllm_engine.decoding.canvas_layout import Blocks, Span
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec
from dllm_engine.decoding.step_plan import (
    RefreshState,
    Retention,
    Scope,
    StepPlan,
    StepWork,
    UnmaskQuota,
    predicts_next,
    step_plan,
)


def plan_blocks(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """The first step of a block feeds what is finished before it and not kept yet (the
    prompt, or the block before), keeps that, and predicts the block in the same pass.
    The others feed the block alone."""
    block = spec.layout.from_block_start(progress.window(spec))
    kept = progress.retained
    final = block.start if progress.num_masked else tokens_kept(spec, progress.running)
    stop = block.stop
    if predicts_next(spec, progress):
        # Rows of finished tokens, and of drafts that will be if they are right.
        final = stop = block.stop if spec.layout.round_length else block.start
    if kept == final:
        work = StepWork(RefreshState.REUSE, Scope.ACTIVE, block, read=kept)
        return step_plan(spec, progress, work)
    finished = Retention.whole(Span(kept, final))
    # Nothing is read before the first pages are written.
    scope = Scope.ACTIVE if kept else Scope.ALL
    span = Span(kept, stop)
    work = StepWork(RefreshState.UPDATE, scope, span, read=kept, adds=[finished])
    return step_plan(spec, progress, work)


def shorten(plan: StepPlan, spec: DecodingSpec, max_rows: int) -> StepPlan | None:
    """Cut ``plan`` to a part of what it keeps before its block: whole blocks of at most
    ``max_rows``. The part fills nothing and has nothing of a method's own. None where
    no block fits.
    """
    start = plan.span.start
    block = spec.layout.from_block_start(plan.window)
    stop = start + max_rows
    if spec.layout.attention == "block_causal":
        stop = spec.layout.block_start(stop)
    stop = min(stop, block.start)
    if stop <= start:
        return None
    part = Span(start, stop)
    reads_own = plan.read > start
    return replace(
        plan,
        span=part,
        read=stop if reads_own else plan.read,
        max_rows=part.size,
        quota=UnmaskQuota(Span(plan.window.start, plan.window.start), 0, 0.0),
        retained=stop,
        post_step=0,
        adds=(Retention.whole(part),),
        own=None,
    )


def tokens_kept(spec: DecodingSpec, running: Blocks) -> int:
    """The most tokens that pages hold while a block runs: those before it, and with
    token editing its own, unless it is the last. In a round, those of its drafts."""
    block = spec.layout.from_block_start(spec.layout.span_of(running))
    if spec.layout.round_length is not None:
        return block.stop
    keeps_own = (
        spec.unmasking.edit_threshold is not None
        and running.stop < spec.layout.num_blocks
    )
    return block.stop if keeps_own else block.start
