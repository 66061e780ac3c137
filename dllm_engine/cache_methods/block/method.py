"""Block diffusion (SDAR, arXiv 2510.06303): the keys and values of finished blocks are
kept, and are exact.
"""

from dataclasses import dataclass

from dllm_engine.cache_methods.base import CacheMethod, hold_tokens
from dllm_engine.cache_methods.finished_blocks import (
    plan_blocks,
    shorten,
    through_block,
    tokens_kept,
)
from dllm_engine.decoding.canvas_layout import Blocks
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec, DraftingOptions
from dllm_engine.decoding.step_plan import RefreshState, StepPlan


class BlockOptions(DraftingOptions):
    """Options of ``block``."""

    sub_block_cache: bool = False
    """Also keep the running block as it was last computed. A step then computes one of
    its ``sub_block_length`` parts alone, except while the first position of the part is
    masked. An approximation (Fast-dLLM v2, arXiv 2509.26328)."""

    @property
    def keeps_running_block(self) -> bool:
        return self.sub_block_cache

    def refusal(self, spec: DecodingSpec) -> str | None:
        if self.sub_block_cache and spec.unmasking.edit_threshold is not None:
            return (
                f"edit_threshold={spec.unmasking.edit_threshold}: sub_block_cache "
                f"computes a part of a block; leave it unset"
            )
        if self.sub_block_cache and spec.layout.round_length is not None:
            return (
                "decoding: sub_block_cache keeps parts of blocks, and here blocks are "
                "single tokens; leave one of them unset"
            )
        return None


@dataclass(frozen=True)
class PartOfBlock:
    """A step that may compute only the window: the rest of its block is kept."""


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Plan a step that keeps finished blocks, and with ``sub_block_cache`` the running
    block.
    """
    if not BlockOptions.of(spec).sub_block_cache:
        return plan_blocks(spec, progress)
    layout = spec.layout
    window = progress.window(spec)
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


def _tokens_kept(spec: DecodingSpec, running: Blocks) -> int:
    if BlockOptions.of(spec).sub_block_cache:
        return through_block(spec, running)
    return tokens_kept(spec, running)


BLOCK = CacheMethod(
    plan,
    hold_tokens(_tokens_kept),
    BlockOptions,
    "dllm_engine.cache_methods.block.layer_pass:BlockPass",
    attention=("block_causal", "causal"),
    shortened=shorten,
    keeps_for_good=True,
)
