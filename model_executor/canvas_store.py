"""Canvases of all running requests, as one tensor on the device."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllm_engine.constraints.constraint import constraint_of
from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.messages import NewRequest
from dllm_engine.decoding.unmasking_policies import SlowFastObservation
from dllm_engine.kernels.sampling import signed_seed
from dllm_engine.model_executor.constraints.accepted_texts import accepted_texts
from dllm_engine.model_executor.constraints.constrained_response import (
    ConstrainedResponse,
)
from dllm_engine.model_executor.constraints.running_decision import RunningDecision
from dllm_engine.model_executor.token_prediction import SamplingSettings
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.statistics import TokenLogprobs

ROOM = 1 << 20
"""Number of positions that are allocated at start (9 MiB)."""
SPARE = 0
"""Place outside all canvases, which is never masked. Padding of recorded steps uses it.
"""


class Canvas:
    """A request's tokens on the device, and the state that its steps leave for the next
    ones.
    """

    start: int
    """Index of the canvas's first position in the ``CanvasStore``. The next two fields
    are views of the store.
    """
    tokens: Tensor
    """``[canvas_length]`` int64: the prompt, then the response, masked positions
    holding the mask token.
    """
    masked: Tensor
    """``[canvas_length]`` bool."""
    logprobs: TokenLogprobs | None = None
    """Log-probabilities at each canvas position, from the last step that predicted it;
    None if the request asks for none."""
    confidences: Tensor | None = None
    """``[canvas_length]`` float32: probability of each position's token, from the last
    step that predicted it (NaN before the first); None if the request does not stream
    by step."""
    own: Any = None
    """State of this request that only the cache method's layer pass reads, outside
    pages: a dataclass of the method, or None.
    """

    def __init__(self, request: NewRequest) -> None:
        self.spec = spec = request.spec
        self.layout = layout = spec.layout
        self.seed = signed_seed(request.seed)
        """Seed of the request's random numbers, as the int64 of the same bits."""
        self.settings = SamplingSettings.of(spec)
        response = [
            -1 if token is None else token for token in layout.response_template
        ]
        behind = [-1] * (layout.canvas_length - layout.response_span.stop)
        self.known = np.array([*request.prompt_token_ids, *response, *behind])
        """``[canvas_length]`` int64 on the host: the tokens after the last reported
        step, −1 where masked. The host lays out a step by them without waiting for the
        device."""
        self.began_masked = self.known < 0
        """``[canvas_length]`` bool on the host: masks before the first step."""
        self.sent = layout.prompt_length
        """Canvas position up to which the response has been reported."""
        self.committed_at = np.zeros(layout.canvas_length, dtype=np.int64)
        """``[canvas_length]``: number of the forward pass that filled each position,
        counted from 1; 0 for the others.
        """
        self.last_unmasked: list[int] = []
        """Positions that the last step filled, ascending."""
        self.page_tables: dict[str, Tensor] = {}
        """Page ids per ``PageKind``, ``[num_layers, most pages of a layer]`` int32; a
        layer with fewer is padded.
        """
        self.guide_text: list[int] = []
        """Tokens of the guide whose keys and values are in pages."""
        self.constrained: ConstrainedResponse | None = None
        if spec.text.is_constrained:
            constraint = constraint_of(
                spec.text.constraint, spec.ends.tokens, spec.text.reasoning
            )
            self.constrained = ConstrainedResponse(
                constraint,
                layout.prompt_length,
                layout.response_template,
                spec.ends.earliest,
                spec.text.thinking_budget,
            )
        self.decision: RunningDecision | None = None
        if spec.decision is not None:
            self.decision = RunningDecision(
                accepted_texts(spec.decision.packed),
                spec.ends.tokens,
                spec.decision.passes,
            )

    def masked_per_block(self, window: Span) -> list[int]:
        """Masked tokens left in each of the blocks that make up ``window``."""
        is_masked = self.known[slice(*window)] < 0
        length = self.layout.block_length
        return [
            int(np.count_nonzero(is_masked[i : i + length]))
            for i in range(0, window.size, length)
        ]

    def slow_fast_observation(self, window: Span, farthest: int) -> SlowFastObservation:
        """Observation of the block ``window`` after a pass; ``farthest`` as in
        ``SlowFastObservation``."""
        masked = np.flatnonzero(self.known[slice(*window)] < 0)
        return SlowFastObservation(
            window.start + int(masked[0]) if masked.size else window.stop, farthest
        )

    def write(
        self, positions: list[int], tokens: list[int]
    ) -> list[tuple[int, int, int]]:
        """Take over the tokens that a step has written. Returns the replaced tokens:
        position, token before and token after.
        """
        before = self.known[positions].tolist()
        self.known[positions] = tokens
        self.last_unmasked = [
            position
            for position, token in zip(positions, before, strict=True)
            if token < 0
        ]
        changes = zip(positions, before, tokens, strict=True)
        return [(p, old, new) for p, old, new in changes if old >= 0 and old != new]

    def take_back(self, positions: list[int]) -> list[tuple[int, int]]:
        """Mask decided positions again; return them with their tokens."""
        tokens = self.known[positions].tolist()
        self.known[positions], self.committed_at[positions] = -1, 0
        return list(zip(positions, tokens, strict=True))

    def take_sendable(self, final: int) -> np.ndarray:
        """Take the canvas positions to send now: decided positions of the response
        before ``final`` that follow no mask, up to the first end token or the last
        complete block."""
        last = min(final, self.layout.response_span.stop)
        # True after most steps, and cheap to check.
        if self.sent < last and self.known[self.sent] < 0:
            return np.arange(0)
        masked = np.flatnonzero(self.known[self.sent : last] < 0)
        decided = self.sent + int(masked[0]) if masked.size else last
        tokens = self.known[self.sent : decided].tolist()
        end = next(
            (i for i, token in enumerate(tokens) if token in self.spec.ends.tokens),
            None,
        )
        if end is not None:
            stop = self.sent + end + 1
        elif masked.size:
            stop = (
                decided
                - (decided - self.layout.blocks_start) % self.layout.block_length
            )
        else:
            stop = decided
        start = self.sent
        self.sent = max(stop, self.sent)
        positions = np.arange(start, self.sent)
        if self.layout.return_given:
            return positions
        return positions[
            [not self.layout.is_given(position) for position in positions.tolist()]
        ]

    def give_up_behind_end(self) -> bool:
        """Replace all tokens behind the first end token of the response by this end
        token. Return True if there is an end token.
        """
        response = self.known[self.layout.prompt_length :]
        ends = np.flatnonzero(np.isin(response, list(self.spec.ends.tokens)))
        if not ends.size:
            return False
        behind = slice(self.layout.prompt_length + int(ends[0]) + 1, None)
        token = int(response[ends[0]])
        if (self.known[behind] != token).any():
            self.known[behind] = token
            self.tokens[behind] = token
            self.masked[behind] = False
        return True


class CanvasStore:
    """All canvases end to end, so that a step reads and writes the tokens of its whole
    batch in one call.
    """

    def __init__(self, device: torch.device, mask_token_id: int) -> None:
        self.mask_token_id = mask_token_id
        self.canvases: dict[str, Canvas] = {}
        """Canvases of the running requests, by request id."""
        self.tokens = torch.empty(ROOM, dtype=torch.int64, device=device)
        """Tokens of all canvases; position p of a canvas is at ``canvas.start + p``.
        The tensor is replaced when more room is needed.
        """
        self.masked = torch.empty(ROOM, dtype=torch.bool, device=device)
        self._begin()

    def open(self, request_id: str, request: NewRequest) -> None:
        """Make the canvas of a new request: its prompt, then masks or the tokens of its
        template.
        """
        spec, device, canvas = request.spec, self.tokens.device, Canvas(request)
        if self._end + spec.layout.canvas_length > self.tokens.numel():
            self._make_room(spec.layout.canvas_length)
        self._place(canvas)
        canvas.tokens.copy_(
            on_device(
                np.where(canvas.known < 0, self.mask_token_id, canvas.known), device
            )
        )
        canvas.masked.copy_(on_device(canvas.known < 0, device))
        if spec.reports.num_logprobs_kept is not None:
            canvas.logprobs = TokenLogprobs.empty(
                canvas.tokens, spec.reports.num_logprobs_kept
            )
        if spec.reports.streams_steps:
            canvas.confidences = torch.full(
                (spec.layout.canvas_length,), torch.nan, device=device
            )
        self.canvases[request_id] = canvas

    def fill(self, places: Tensor, tokens: Tensor, chosen: Tensor) -> None:
        """Write ``tokens`` to the ``chosen`` ones of ``places``; ``[n]`` each."""
        self.tokens[places] = torch.where(chosen, tokens, self.tokens[places])
        self.masked[places] = self.masked[places] & ~chosen

    def take_back(self, places: Tensor, chosen: Tensor) -> None:
        """Mask the ``chosen`` ones of ``places`` again; ``[n]`` each."""
        tokens = self.tokens[places]
        self.tokens[places] = tokens.masked_fill(chosen, self.mask_token_id)
        self.masked[places] = self.masked[places] | chosen

    def _make_room(self, canvas_length: int) -> None:
        """Make room for one more canvas: move the others together."""
        canvases = self.canvases.values()
        # Twice the needed size, so that a canvas moves only a few times while others
        # come and go.
        size = 2 * (
            canvas_length + sum(canvas.layout.canvas_length for canvas in canvases)
        )
        if size > self.tokens.numel():
            self.tokens, self.masked = (
                self.tokens.new_empty(size),
                self.masked.new_empty(size),
            )
            contents = [(canvas.tokens, canvas.masked) for canvas in canvases]
        else:
            contents = [
                (canvas.tokens.clone(), canvas.masked.clone()) for canvas in canvases
            ]
        self._begin()
        for canvas, (tokens, masked) in zip(canvases, contents, strict=True):
            self._place(canvas)
            canvas.tokens.copy_(tokens)
            canvas.masked.copy_(masked)

    def _begin(self) -> None:
        self.tokens[SPARE], self.masked[SPARE] = self.mask_token_id, False
        self._end = SPARE + 1

    def _place(self, canvas: Canvas) -> None:
        canvas.start = self._end
        self._end += canvas.layout.canvas_length
        canvas.tokens = self.tokens[canvas.start : self._end]
        canvas.masked = self.masked[canvas.start : self._end]
