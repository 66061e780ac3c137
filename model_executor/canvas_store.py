"""Canvases of all running requests, as one tensor on the device."""

import numpy as np
import torch

from dllm_engine.kernels.noise import signed_seed
from dllm_engine.model_executor.step_batch import Canvas
from dllm_engine.model_executor.token_prediction import SamplingSettings
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.statistics import TokenLogprobs
from dllm_engine.scheduler.constraints.constraint import ConstrainedResponse, constraint_of
from dllm_engine.scheduler.constraints.decision import RunningDecision, unpacked_decision
from dllm_engine.scheduler.messages import NewRequest

ROOM = 1 << 20
"""Positions that there is room for from the start (9 MiB)."""
SPARE = 0
"""A place of no canvas, which is never masked: what fills up a recorded step is there."""


class CanvasStore:
    """All canvases end to end, so that a step reads and writes the tokens of its whole batch in one call."""

    def __init__(self, device: torch.device, mask_token_id: int) -> None:
        self.mask_token_id = mask_token_id
        self.canvases: dict[str, Canvas] = {}
        """Of the running requests, by request id."""
        self.tokens = torch.empty(ROOM, dtype=torch.int64, device=device)
        """Position p of a canvas is at ``canvas.start + p``. Another tensor once more room is needed."""
        self.masked = torch.empty(ROOM, dtype=torch.bool, device=device)
        self._begin()

    def open(self, request_id: str, request: NewRequest) -> None:
        """Make the canvas of a new request: its prompt, and masks or what its template gives."""
        spec, device = request.spec, self.tokens.device
        canvas = Canvas(spec, signed_seed(request.seed), SamplingSettings.of(spec))
        if self._end + spec.canvas_length > self.tokens.numel():
            self._make_room(spec.canvas_length)
        self._place(canvas)
        response = [-1 if token is None else token for token in spec.response_template]
        behind = [-1] * (spec.canvas_length - spec.response_span.stop)
        canvas.known = np.array([*request.prompt_token_ids, *response, *behind])
        canvas.tokens.copy_(on_device(np.where(canvas.known < 0, self.mask_token_id, canvas.known), device))
        canvas.masked.copy_(on_device(canvas.known < 0, device))
        if spec.constraint is not None:
            constraint = constraint_of(spec.constraint, spec.end_tokens, spec.reasoning)
            canvas.constrained = ConstrainedResponse(
                constraint, spec.prompt_length, spec.response_template, spec.first_end
            )
        if spec.decision is not None:
            canvas.decision = RunningDecision(unpacked_decision(spec.decision), spec.end_tokens, spec.passes)
        if spec.num_logprobs_kept is not None:
            canvas.logprobs = TokenLogprobs.empty(canvas.tokens, spec.num_logprobs_kept)
        if spec.return_order:
            canvas.committed_at = np.zeros(spec.canvas_length, dtype=np.int64)
        if spec.streams_steps:
            canvas.confidences = torch.full((spec.canvas_length,), torch.nan, device=device)
        self.canvases[request_id] = canvas

    def close(self, request_id: str) -> None:
        """Forget a request; nothing happens for one that is not there."""
        self.canvases.pop(request_id, None)

    def fill(self, places: torch.Tensor, tokens: torch.Tensor, chosen: torch.Tensor) -> None:
        """Unmask the ``chosen`` ones of ``places`` with ``tokens``; ``[n]`` each."""
        self.tokens[places] = torch.where(chosen, tokens, self.tokens[places])
        self.masked[places] = self.masked[places] & ~chosen

    def _make_room(self, canvas_length: int) -> None:
        """Make room for one more; those still running close ranks."""
        canvases = self.canvases.values()
        # Twice what is needed, so that a canvas moves a bounded number of times as others come and go.
        size = 2 * (canvas_length + sum(canvas.spec.canvas_length for canvas in canvases))
        if size > self.tokens.numel():
            self.tokens, self.masked = self.tokens.new_empty(size), self.masked.new_empty(size)
            kept = [(canvas.tokens, canvas.masked) for canvas in canvases]
        else:
            kept = [(canvas.tokens.clone(), canvas.masked.clone()) for canvas in canvases]
        self._begin()
        for canvas, (tokens, masked) in zip(canvases, kept, strict=True):
            self._place(canvas)
            canvas.tokens.copy_(tokens)
            canvas.masked.copy_(masked)

    def _begin(self) -> None:
        self.tokens[SPARE], self.masked[SPARE] = self.mask_token_id, False
        self._end = SPARE + 1

    def _place(self, canvas: Canvas) -> None:
        canvas.start, self._end = self._end, self._end + canvas.spec.canvas_length
        canvas.tokens = self.tokens[canvas.start : self._end]
        canvas.masked = self.masked[canvas.start : self._end]
