"""Where the canvases of all running requests lie on the device."""

import numpy as np
import torch

from dllm_engine.kernels.noise import signed_seed
from dllm_engine.model_executor.step_batch import Canvas
from dllm_engine.model_executor.token_prediction import SamplingSettings
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.statistics import TokenLogprobs
from dllm_engine.scheduler.messages import NewRequest


class CanvasStore:
    """All canvases end to end, so that a step reads and writes the tokens of its whole batch in one call."""

    def __init__(self, device: torch.device, mask_token_id: int) -> None:
        self.mask_token_id = mask_token_id
        self.canvases: dict[str, Canvas] = {}
        """Of the running requests, by request id."""
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        """Position p of a canvas is at ``canvas.start + p``."""
        self.masked = torch.empty(0, dtype=torch.bool, device=device)
        self._end = 0

    def open(self, request_id: str, request: NewRequest) -> None:
        """Make the canvas of a new request: its prompt, and masks."""
        spec, device = request.spec, self.tokens.device
        canvas = Canvas(spec, signed_seed(request.seed), SamplingSettings.of(spec))
        if self._end + spec.canvas_length > self.tokens.numel():
            self._grow(spec.canvas_length)
        self._place(canvas)
        canvas.known = np.full(spec.canvas_length, -1)
        canvas.known[: spec.prompt_length] = request.prompt_token_ids
        canvas.tokens[: spec.prompt_length] = on_device(request.prompt_token_ids, device)
        canvas.tokens[spec.prompt_length :] = self.mask_token_id
        canvas.masked[: spec.prompt_length] = False
        canvas.masked[spec.prompt_length :] = True
        if spec.num_logprobs is not None:
            canvas.logprobs = TokenLogprobs.empty(spec.canvas_length, spec.num_logprobs, device)
        if spec.streams_steps:
            canvas.confidences = torch.full((spec.canvas_length,), torch.nan, device=device)
        self.canvases[request_id] = canvas

    def close(self, request_id: str) -> None:
        """Forget a request; nothing happens for one that is not there."""
        self.canvases.pop(request_id, None)

    def _grow(self, canvas_length: int) -> None:
        """Make room for one more; those still running close ranks."""
        canvases = self.canvases.values()
        # Twice what is needed, so that a canvas moves a bounded number of times as others come and go.
        size = 2 * (canvas_length + sum(canvas.spec.canvas_length for canvas in canvases))
        self.tokens, self.masked, self._end = self.tokens.new_empty(size), self.masked.new_empty(size), 0
        for canvas in canvases:
            tokens, masked = canvas.tokens, canvas.masked
            self._place(canvas)
            canvas.tokens.copy_(tokens)
            canvas.masked.copy_(masked)

    def _place(self, canvas: Canvas) -> None:
        canvas.start, self._end = self._end, self._end + canvas.spec.canvas_length
        canvas.tokens = self.tokens[canvas.start : self._end]
        canvas.masked = self.masked[canvas.start : self._end]
