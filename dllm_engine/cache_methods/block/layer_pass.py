"""Passes of block diffusion: of whole blocks, or of the parts of a running one."""

import numpy as np

from dllm_engine.cache_methods.block.method import BlockOptions
from dllm_engine.decoding.step_plan import StepPlan
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import LayerPass, Repeats
from dllm_engine.model_executor.passes.paged import OverwritePass, RetentionPass
from dllm_engine.model_executor.step_batch import StepBatch


class BlockPass(RetentionPass):
    """Keeps finished blocks."""

    @staticmethod
    def positions(plan: StepPlan, canvas: Canvas) -> np.ndarray:
        """With ``sub_block_cache``, the window alone once its first position is known:
        no row of the window predicts that one.
        """
        if plan.own is not None and canvas.known[plan.window.start] >= 0:
            return np.arange(*plan.window)
        return np.arange(*plan.span)

    @classmethod
    def of(cls, batch: StepBatch, pages: PageMemory) -> LayerPass:
        keeps_running = BlockOptions.of(batch.canvases[0].spec).sub_block_cache
        return (PartsPass if keeps_running else cls)(batch, pages)


class PartsPass(OverwritePass):
    """Keeps the running block as well, as it was last computed."""

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        super().__init__(batch, pages)
        self.repeats = Repeats.OTHER_WORK  # the rows depend on tokens
