"""Steps of methods that keep finished blocks. With attention by blocks their keys and
values are exact.

A block is finished when none of its tokens can change. With token editing, a step that
begins without masks also keeps its block: if it replaces no token, the kept block is
final, and the next block does not feed it again.
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
    """The first step of a block feeds the finished tokens before it that are not kept
    yet (the prompt, or the block before), keeps them, and predicts the block in the
    same pass. Other steps feed only the block."""
    block = spec.layout.from_block_start(progress.window(spec))
    kept = progress.retained
    final = block.start if progress.num_masked else tokens_kept(spec, progress.running)
    stop = block.stop
    if predicts_next(spec, progress):
        # Keep rows of finished tokens, and of drafts, which are final if they are
        # right.
        final = stop = block.stop if spec.layout.round_length else block.start
    if kept == final:
        work = StepWork(RefreshState.REUSE, Scope.ACTIVE, block, read=kept)
        return step_plan(spec, progress, work)
    finished = Retention.whole(Span(kept, final))
    # Before the first pages are written, nothing is read.
    scope = Scope.ACTIVE if kept else Scope.ALL
    span = Span(kept, stop)
    work = StepWork(RefreshState.UPDATE, scope, span, read=kept, adds=[finished])
    return step_plan(spec, progress, work)


def shorten(plan: StepPlan, spec: DecodingSpec, max_rows: int) -> StepPlan | None:
    """Cut ``plan`` to a part of the tokens that it keeps before its block: whole
    blocks, at most ``max_rows``. The part fills nothing, and drops ``own``. None if no
    block fits.
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


def through_block(spec: DecodingSpec, running: Blocks) -> int:
    """Tokens up to the end of the running block, for methods that also keep its rows as
    they were last computed.
    """
    return spec.layout.from_block_start(spec.layout.span_of(running)).stop


def tokens_kept(spec: DecodingSpec, running: Blocks) -> int:
    """The most tokens that pages hold while a block runs: the tokens before it, and
    with token editing also its own tokens, unless it is the last block. In a round of
    self-speculation, also the drafts."""
    block = spec.layout.from_block_start(spec.layout.span_of(running))
    if spec.layout.round_length is not None:
        return block.stop
    keeps_own = (
        spec.unmasking.edit_threshold is not None
        and running.stop < spec.layout.num_blocks
    )
    return block.stop if keeps_own else block.start
