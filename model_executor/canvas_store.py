"""Where the canvases of all running requests lie on the device."""

from collections.abc import Sequence

import torch

from dllm_engine.model_executor.step_batch import Canvas


class CanvasStore:
    """All canvases end to end, so that a step reads and writes the tokens of its whole batch in one call."""

    def __init__(self, device: torch.device) -> None:
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        """Position p of a canvas is at ``canvas.start + p``."""
        self.masked = torch.empty(0, dtype=torch.bool, device=device)
        self._end = 0

    def add(self, canvas: Canvas, others: Sequence[Canvas]) -> None:
        """Make room for a canvas. Where there is none the ``others``, those still running, close ranks."""
        if self._end + canvas.spec.canvas_length > self.tokens.numel():
            self._grow(canvas.spec.canvas_length, others)
        self._place(canvas)

    def _grow(self, canvas_length: int, others: Sequence[Canvas]) -> None:
        # Twice what is needed, so that a canvas moves a bounded number of times as others come and go.
        size = 2 * (canvas_length + sum(canvas.spec.canvas_length for canvas in others))
        self.tokens, self.masked, self._end = self.tokens.new_empty(size), self.masked.new_empty(size), 0
        for canvas in others:
            tokens, masked = canvas.tokens, canvas.masked
            self._place(canvas)
            canvas.tokens.copy_(tokens)
            canvas.masked.copy_(masked)

    def _place(self, canvas: Canvas) -> None:
        canvas.start, self._end = self._end, self._end + canvas.spec.canvas_length
        canvas.tokens = self.tokens[canvas.start : self._end]
        canvas.masked = self.masked[canvas.start : self._end]
