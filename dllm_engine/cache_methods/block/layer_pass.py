"""Layer passes of block diffusion: over whole blocks, or over parts of the running
block.
"""

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from dllm_engine.cache_methods.block.method import BlockOptions
from dllm_engine.decoding.step_plan import StepPlan
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import (
    LayerPass,
    Repeats,
    Results,
    run_layers,
)
from dllm_engine.model_executor.passes.paged import OverwritePass, RetentionPass
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.transfer import on_device


class BlockPass(RetentionPass):
    """Pass that keeps finished blocks."""

    @staticmethod
    def positions(plan: StepPlan, canvas: Canvas) -> np.ndarray:
        """Positions of a plan's rows. With ``sub_block_cache``, only the window, once
        its first position is known, because no row of the window predicts this
        position.
        """
        if plan.own is not None and canvas.known[plan.window.start] >= 0:
            return np.arange(*plan.window)
        return np.arange(*plan.span)

    @classmethod
    def of(cls, batch: StepBatch, pages: PageMemory) -> LayerPass:
        options = BlockOptions.of(batch.canvases[0].spec)
        if options.sub_block_cache:
            return PartsPass(batch, pages)
        if options.draft_lora is not None and (drafts := _draft_rows(batch)).size:
            return DraftPass(batch, pages, drafts)
        return cls(batch, pages)


class DraftPass(RetentionPass):
    """Pass that keeps finished blocks, and applies the low-rank update to rows of
    drafts.
    """

    def __init__(self, batch: StepBatch, pages: PageMemory, drafts: np.ndarray) -> None:
        """``drafts``: indices of the rows of drafts."""
        super().__init__(batch, pages)
        self.drafts = on_device(drafts, batch.device)

    def __call__(
        self, layers: Iterable[DecoderLayer], hidden: Tensor, phases: RotaryPhases
    ) -> tuple[Tensor, Results]:
        return run_layers(layers, hidden, phases, self.attend, self.drafts), ()


def _draft_rows(batch: StepBatch) -> np.ndarray:
    """Indices of the rows that draft, without the rows of finished tokens before them."""
    first_drafts = []
    for canvas, plan in zip(batch.canvases, batch.plans, strict=True):
        layout = canvas.layout
        drafts = layout.has_drafts and not plan.quota.verifies
        first = layout.from_block_start(plan.window).start
        first_drafts.append(first if drafts else layout.canvas_length)
    firsts = np.repeat(first_drafts, batch.sizes)
    return np.flatnonzero(batch.host_positions >= firsts)


class PartsPass(OverwritePass):
    """Pass that also keeps the running block, as it was last computed."""

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        super().__init__(batch, pages)
        self.repeats = Repeats.OTHER_WORK  # which rows run depends on tokens
