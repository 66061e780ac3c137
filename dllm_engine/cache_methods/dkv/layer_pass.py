"""Layer pass of dKV-Cache-Decode (arXiv 2505.15781): rows of masked positions, and of
positions that the last step decoded.
"""

import numpy as np
import torch
from torch import Tensor

from dllm_engine.cache_methods.dkv.method import DKVStep
from dllm_engine.decoding.step_plan import StepPlan
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import LayerPass, Repeats
from dllm_engine.model_executor.passes.paged import OverwritePass
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.transfer import on_device


class MaskedRowsPass(OverwritePass):
    """Pass that computes, between refreshes, the rows of positions that were masked
    when the previous step began.
    """

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        super().__init__(batch, pages)
        if any(plan.own != DKVStep() for plan in batch.plans):
            self.repeats = Repeats.OTHER_WORK
            return
        self.repeats = Repeats.AFTER_FOLLOW
        shift = int(batch.canvases[0].layout.shifts_logits)
        masked = []
        for index, canvas in enumerate(batch.canvases):
            positions = batch.host_positions[batch.rows(index)]
            masked.append(canvas.known[positions + shift] < 0)
        self.predicted = batch.places + shift
        """Index in the ``CanvasStore`` of the position that each row predicts."""
        self.masked = on_device(np.concatenate(masked), batch.device, torch.bool)
        """Rows whose position was masked when the last step began."""

    @staticmethod
    def positions(plan: StepPlan, canvas: Canvas) -> np.ndarray:
        span = LayerPass.positions(plan, canvas)
        if plan.own is None:
            return span
        shift = int(canvas.layout.shifts_logits)
        was_masked = canvas.known < 0
        was_masked[canvas.last_unmasked] = True
        # With shifted logits the last row of a canvas predicts nothing.
        predicts_masked = np.append(
            was_masked[plan.span.start + shift : plan.span.stop],
            np.zeros(shift, dtype=bool),
        )
        predicts_masked[-1] |= plan.own.last_row
        return span[predicts_masked]

    def follow(self, masked: Tensor) -> None:
        """Leave out rows of positions that were decided before the last step: their
        keys and values stay.
        """
        assert self.row_slots is not None
        self.row_slots = self.row_slots.masked_fill(~self.masked[:, None], -1)
        self.masked = masked[self.predicted]
