"""Block diffusion (SDAR, arXiv 2510.06303): the keys and values of finished blocks are
kept, and are exact.

A block is finished when none of its tokens can change. With token editing (LLaDA2.1), a
step that begins without masks keeps its block as well: if it replaces no token, what it
has kept is final, and the next block feeds that no more.
"""

from dataclasses import dataclass, replace

from dllm_engine.cache_methods.base import CacheMethod, hold_tokens
from dllm_engine.decoding.canvas_layout import Blocks, Span
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import CacheOptions, DecodingSpec
from dllm_engine.decoding.step_plan import (
    RefreshState,
    Retention,
    Scope,
    StepPlan,
    StepWork,
    UnmaskQuota,
    begins_with_seed,
    step_plan,
)


class BlockOptions(CacheOptions):
    """Options of ``block``."""

    sub_block_cache: bool = False
    """Also keep the running block as it was last computed. A step then computes one of
    its ``sub_block_length`` parts alone, except while the first position of the part is
    masked (Fast-dLLM v2). An approximation."""

    def refusal(self, spec: DecodingSpec) -> str | None:
        if self.sub_block_cache and spec.unmasking.edit_threshold is not None:
            return (
                f"edit_threshold={spec.unmasking.edit_threshold}: sub_block_cache "
                f"computes a part of a block; leave it unset"
            )
        return None


@dataclass(frozen=True)
class PartOfBlock:
    """A step that may compute the window alone: what else is in its block is kept."""


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """A step that keeps finished blocks, and the running one where that is asked for."""
    if not BlockOptions.of(spec).sub_block_cache:
        return plan_blocks(spec, progress)
    layout = spec.layout
    window = layout.span_of(progress.running)
    block = layout.from_block_start(window)
    planned = plan_blocks(spec, progress)
    planned.retained = block.start
    planned.read = planned.span.stop
    seeded = layout.block_start(window.start) == window.start and layout.seeds_blocks
    begins = progress.running.first == 0 or block.start == window.start
    is_first = begins and progress.step == int(seeded)
    if planned.state is RefreshState.REUSE and not is_first:
        planned.own = PartOfBlock()
    return planned


def plan_blocks(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """The first step of a block feeds what is finished before it and not kept yet (the
    prompt, or the block before), keeps that, and predicts the block in the same pass.
    The others feed the block alone."""
    block, kept = (
        spec.layout.from_block_start(spec.layout.span_of(progress.running)),
        progress.retained,
    )
    final = block.start if progress.num_masked else tokens_kept(spec, progress.running)
    if kept == final:
        work = StepWork(RefreshState.REUSE, Scope.ACTIVE, block, read=kept)
        return step_plan(spec, progress, work)
    finished = Retention.whole(Span(kept, final))
    # Nothing is read before the first pages are written.
    scope = Scope.ACTIVE if kept else Scope.ALL
    # A seed is predicted by the last row of what is finished.
    stop = block.start if begins_with_seed(spec, progress) else block.stop
    span = Span(kept, stop)
    work = StepWork(RefreshState.UPDATE, scope, span, read=kept, adds=[finished])
    return step_plan(spec, progress, work)


def shortened(plan: StepPlan, spec: DecodingSpec, max_rows: int) -> StepPlan | None:
    """A part of what ``plan`` keeps, whole blocks of at most ``max_rows``; it fills
    nothing. None where no block fits."""
    start, kept = plan.span.start, plan.retained
    stop = start + max_rows
    if spec.layout.attention == "block_causal":
        stop = spec.layout.block_start(stop)
    stop = min(stop, kept)
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
    )


def tokens_kept(spec: DecodingSpec, running: Blocks) -> int:
    """The most tokens that pages hold while a block runs: those before it, and with
    token editing its own, unless it is the last."""
    block = spec.layout.from_block_start(spec.layout.span_of(running))
    if BlockOptions.of(spec).sub_block_cache:
        return block.stop
    keeps_own = (
        spec.unmasking.edit_threshold is not None
        and running.stop < spec.layout.num_blocks
    )
    return block.stop if keeps_own else block.start


BLOCK = CacheMethod(
    plan,
    hold_tokens(tokens_kept),
    BlockOptions,
    "dllm_engine.cache_methods.block.layer_pass:BlockPass",
    attention=("block_causal", "causal"),
    shortened=shortened,
    keeps_for_good=True,
)
