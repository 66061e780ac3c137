"""The rows of one forward pass: all scheduled requests, flattened."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, takewhile
from typing import Any

import numpy as np
import torch

from dllm_engine.model_executor.token_prediction import SamplingSettings
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.statistics import TokenLogprobs
from dllm_engine.scheduler.constraints.constraint import ConstrainedResponse
from dllm_engine.scheduler.constraints.decision import RunningDecision
from dllm_engine.scheduler.page_layout import PageKind
from dllm_engine.scheduler.request import DecodingSpec, Span
from dllm_engine.scheduler.step_plan import RowRule, Scope, StepPlan
from dllm_engine.scheduler.unmasking_policies import SeenOfBlock


@dataclass
class Canvas:
    """A request's tokens on the device, and what its next step must know of the last ones."""

    spec: DecodingSpec
    seed: int
    """Key of its random numbers, as the int64 of the same bits."""
    settings: SamplingSettings
    start: int = field(init=False)
    """First index of its part of the ``CanvasStore``. The next two are views of that part."""
    tokens: torch.Tensor = field(init=False)
    """``[canvas_length]`` int64: the prompt, then the response, masked positions holding the mask token."""
    masked: torch.Tensor = field(init=False)
    """``[canvas_length]`` bool."""
    known: np.ndarray = field(init=False)
    """``[canvas_length]`` int64 on the host: the tokens after the last step that was reported, −1 where masked. With it
    the host lays out a step without asking the device."""
    sent: int = field(init=False)
    """The response up to this canvas position has been reported to be sent."""
    last_unmasked: list[int] = field(default_factory=list)
    """Positions that the last step filled, ascending."""
    next_rows: np.ndarray | None = None
    """Positions that the last step's pass chose for the next one, ascending; None where it chooses none."""
    page_tables: dict[PageKind, torch.Tensor] = field(default_factory=dict)
    """Page ids per kind, ``[num_layers, most pages of a layer]`` int32; a layer with fewer is padded."""
    guide_text: list[int] = field(default_factory=list)
    """The guide's tokens whose keys and values its pages hold."""
    constrained: ConstrainedResponse | None = None
    """None if the response may be any text."""
    decision: RunningDecision | None = None
    """None if the request is no decision."""
    logprobs: TokenLogprobs | None = None
    """Log-probabilities at each canvas position, from the last step that predicted it; None if the request asks for
    none."""
    committed_at: np.ndarray | None = None
    """``[canvas_length]`` int64: forward pass, counted from 1, that filled each position; 0 where none did. None if the
    request does not ask for it."""
    confidences: torch.Tensor | None = None
    """``[canvas_length]`` float32: probability of each position's token, from the last step that predicted it (NaN
    before the first); None if the request does not stream by step."""
    cache_state: Any = None
    """State of the cache method for this request, outside pages."""

    def __post_init__(self) -> None:
        self.sent = self.spec.prompt_length

    def masked_per_block(self, window: Span) -> list[int]:
        """Masked tokens left in each of the blocks that make up ``window``."""
        is_masked = self.known[slice(*window)] < 0
        length = self.spec.block_length
        return [int(np.count_nonzero(is_masked[i : i + length])) for i in range(0, window.size, length)]

    def seen(self, window: Span, farthest: int) -> SeenOfBlock:
        """Observation of SlowFast sampling for the block ``window`` after a pass; ``farthest`` as in
        ``SeenOfBlock``."""
        masked = np.flatnonzero(self.known[slice(*window)] < 0)
        return SeenOfBlock(window.start + int(masked[0]) if masked.size else window.stop, farthest)

    def write(self, positions: list[int], tokens: list[int]) -> list[tuple[int, int, int]]:
        """Take in the tokens that a step wrote. Return what it replaced: position, token before and after."""
        before = self.known[positions].tolist()
        self.known[positions] = tokens
        self.last_unmasked = [position for position, token in zip(positions, before, strict=True) if token < 0]
        changes = zip(positions, before, tokens, strict=True)
        return [change for change in changes if change[1] >= 0]

    def take_sendable(self, final: int) -> np.ndarray:
        """Canvas positions to send now, within the response and before ``final``: decided positions with no mask before
        them, up to the first end token or the last complete block."""
        last = min(final, self.spec.response_span.stop)
        if self.sent < last and self.known[self.sent] < 0:  # after most steps, and quickly told
            return np.arange(0)
        masked = np.flatnonzero(self.known[self.sent : last] < 0)
        decided = self.sent + int(masked[0]) if masked.size else last
        tokens = self.known[self.sent : decided].tolist()
        end = next((i for i, token in enumerate(tokens) if token in self.spec.end_tokens), None)
        if end is not None:
            stop = self.sent + end + 1
        elif masked.size:
            stop = decided - (decided - self.spec.blocks_start) % self.spec.block_length
        else:
            stop = decided
        start, self.sent = self.sent, max(stop, self.sent)
        positions = np.arange(start, self.sent)
        if self.spec.return_given:
            return positions
        return positions[[not self.spec.is_given(position) for position in positions.tolist()]]

    def give_up_behind_end(self) -> bool:
        """Replace all tokens behind the first end token of the response by end tokens; return True if there is one."""
        response = self.known[self.spec.prompt_length :]
        ends = np.flatnonzero(np.isin(response, list(self.spec.end_tokens)))
        if not ends.size:
            return False
        behind = slice(self.spec.prompt_length + int(ends[0]) + 1, None)
        token = int(response[ends[0]])
        if (self.known[behind] != token).any():
            self.known[behind] = token
            self.tokens[behind] = token
            self.masked[behind] = False
        return True


class RowBounds:
    """Bounds of each request's rows in a batch whose rows lie end to end."""

    def __init__(self, sizes: Sequence[int], device: torch.device, limits: torch.Tensor | None = None) -> None:
        """
        Args:
            sizes: rows of each request.
            limits: how many of its request's keys each row attends to, int32 ``[num_rows]``; None: all of them.
        """
        self.sizes, self.device, self.limits = sizes, device, limits
        self.bounds = list(accumulate(sizes, initial=0))
        """First row of each request and, last, the number of rows."""
        self.max_seqlen = max(sizes, default=0)
        self.is_padded = False
        """True if ``cu_seqlens`` alone has the bounds."""

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """The bounds on the device, int32."""
        return on_device(self.bounds, self.device, torch.int32)

    def rows(self, index: int) -> slice:
        """Rows of a request."""
        return slice(self.bounds[index], self.bounds[index + 1])


class SplitRows(RowBounds):
    """Rows of which the last requests attend to nothing but their own rows, and those before to pages as well."""

    def __init__(
        self, sizes: Sequence[int], alone: Sequence[bool], device: torch.device, limits: torch.Tensor | None = None
    ) -> None:
        """``alone``: requests that need no pages. A request followed by one that needs pages counts as needing them."""
        super().__init__(sizes, device, limits)
        num_alone = len(list(takewhile(bool, reversed(alone))))
        num_paged = len(sizes) - num_alone
        self.num_paged_rows = self.bounds[num_paged]
        n = self.num_paged_rows
        paged_limits, alone_limits = (None, None) if limits is None else (limits[:n], limits[n:])
        self.paged = RowBounds([*sizes[:num_paged], *[0] * num_alone], device, paged_limits)
        """Rows of all requests, without the rows of those that attend alone."""
        self.alone = RowBounds(sizes[num_paged:], device, alone_limits)
        """Rows of the requests that attend alone, which follow the first ``num_paged_rows``."""


class RowChoice:
    """Rows that are computed of each request: fixed ones, and behind them some that are chosen from others."""

    def __init__(
        self, fixed: Sequence[Span], others: Sequence[Span], counts: Sequence[int | None], device: torch.device
    ) -> None:
        """``counts``: how many of ``others`` are chosen; None: it is not asked which. All by request."""
        fixed_sizes = [span.size for span in fixed]
        self.sizes = [size + (count or 0) for size, count in zip(fixed_sizes, counts, strict=True)]
        firsts = [0, *accumulate(self.sizes)]
        places = ranges([span.start for span in fixed], fixed_sizes)[1], ranges(firsts[:-1], fixed_sizes)[1]
        self.fixed, self.fixed_places = on_device(np.stack(places), device).unbind()
        """The fixed rows, and their places among the computed rows."""
        alike: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for span, first, size, count in zip(others, firsts, fixed_sizes, counts, strict=False):
            if count is not None:
                alike[span.size, count].append((span.start, first + size))
        spans = [(start, size) for (size, _), members in alike.items() for start, _ in members]
        self.chosen_from = ranges([start for start, _ in spans], [size for _, size in spans])[1]
        """The rows to choose from, group after group, on the host."""
        self.groups = []
        """Per group of equal shape, the rows to choose from ``[group, rows]``, and the places of those chosen
        ``[group, chosen]``."""
        for (size, count), members in alike.items():
            starts, first_places = on_device(members, device)[:, None].unbind(dim=2)
            numbers = torch.arange(max(size, count), device=device)
            self.groups.append((starts + numbers[:size], first_places + numbers[:count]))

    def rows(self, chosen: Sequence[torch.Tensor]) -> torch.Tensor:
        """The computed rows, from the indices of those chosen in each group, ``[group, chosen]``."""
        if len(self.groups) == 1 and not self.fixed.numel():
            return self.groups[0][0].gather(1, chosen[0]).flatten()  # the places of a group alone ascend
        rows = torch.empty(sum(self.sizes), dtype=torch.int64, device=self.fixed.device)
        rows[self.fixed_places] = self.fixed
        for (others, places), which in zip(self.groups, chosen, strict=True):
            rows[places] = others.gather(1, which)
        return rows

    def graph_inputs(self) -> list[torch.Tensor]:
        """As ``LayerPass.graph_inputs``."""
        return [self.fixed, self.fixed_places, *(tensor for group in self.groups for tensor in group)]


class StepBatch(RowBounds):
    """Requests in batch order, and the rows that they compute."""

    def __init__(
        self,
        canvases: list[Canvas],
        positions: Sequence[np.ndarray],
        plans: Sequence[StepPlan] = (),
        request_ids: Sequence[str] = (),
    ) -> None:
        """
        Args:
            positions: of each request's rows in its canvas, ascending.
            plans, request_ids: those of a step; of rows of another text (a guide's) there are none.
        """
        super().__init__([request_positions.size for request_positions in positions], canvases[0].tokens.device)
        self.canvases, self.request_ids = canvases, request_ids
        self.plans = plans
        """Plans of the running step. The next step replaces them where it does the same work on other tokens."""
        self.host_positions = np.concatenate(positions)
        """``positions`` on the host."""
        places = self.host_positions + np.repeat([canvas.start for canvas in canvases], self.sizes)
        self.positions, self.places = on_device(np.stack((self.host_positions, places)), self.device).unbind()
        """``[num_rows]`` each: position in the canvas, and index of the row's token in the ``CanvasStore``."""
        self.limits = self._limits()
        """The canvas position before which each row's block ends; None where all rows of a request attend to each
        other. Keys that lie by position are limited by it."""

    @classmethod
    def of(cls, plans: dict[str, StepPlan], canvases: dict[str, Canvas]) -> "StepBatch":
        """The rows of all plans, request by request. Plans that name rows by a rule are resolved here."""
        rows = {request_id: row_positions(plan, canvases[request_id]) for request_id, plan in plans.items()}
        # Sequences of equal length side by side share one attention call. Those that need no pages come last.
        ordered = sorted(plans, key=lambda i: (plans[i].scope is Scope.ALL, rows[i].size, plans[i].read))
        return cls([canvases[i] for i in ordered], [rows[i] for i in ordered], [plans[i] for i in ordered], ordered)

    def _limits(self) -> torch.Tensor | None:
        specs = [canvas.spec for canvas in self.canvases]
        if any(spec.attention == "full" for spec in specs):
            return None
        lengths = np.array([spec.block_length for spec in specs])
        bounds = np.array(self.bounds)
        firsts, lasts = self.host_positions[bounds[:-1]], self.host_positions[bounds[1:] - 1]
        if np.array_equal(firsts // lengths, lasts // lengths):
            return None  # of one block each, which sees all that lies before it
        lengths = np.repeat(lengths, self.sizes)
        ends = (self.host_positions // lengths + 1) * lengths
        return on_device(ends, self.device, torch.int32)

    def split_rows(self, alone: Sequence[bool]) -> SplitRows:
        """``alone``: which requests need no pages."""
        return SplitRows(self.sizes, alone, self.device, self.limits)

    @cached_property
    def requests(self) -> torch.Tensor:
        """``[num_rows]`` int64: the request that each row belongs to."""
        return on_device(np.repeat(np.arange(len(self.sizes)), self.sizes), self.device)


def row_positions(plan: StepPlan, canvas: Canvas) -> np.ndarray:
    """The canvas positions of a plan's rows, ascending."""
    if plan.rows is RowRule.CHOSEN:
        assert canvas.next_rows is not None
        return canvas.next_rows
    span, shift = plan.span, int(canvas.spec.shifts_logits)
    if plan.rows is RowRule.FROM_LAST_UNMASKED and canvas.last_unmasked:
        return np.arange(min(span.start, max(canvas.last_unmasked[0] - shift, 0)), span.stop)
    positions = np.arange(*span)
    if plan.rows not in (RowRule.MASKED_BEFORE, RowRule.MASKED_BEFORE_AND_LAST):
        return positions
    was_masked = canvas.known < 0
    was_masked[canvas.last_unmasked] = True
    # The last row of a canvas predicts nothing with shifted logits.
    chosen = np.append(was_masked[span.start + shift : span.stop], np.zeros(shift, dtype=bool))
    chosen[-1] |= plan.rows is RowRule.MASKED_BEFORE_AND_LAST
    return positions[chosen]


def ranges(starts: Sequence[int], sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate ranges of integers. Returns the range number of each integer, and the integers; int64 arrays."""
    bounds_of_ranges = np.array([starts, sizes], dtype=np.int64)
    owners = np.repeat(np.arange(len(sizes)), bounds_of_ranges[1])
    shifts = bounds_of_ranges[0] - bounds_of_ranges[1].cumsum() + bounds_of_ranges[1]
    return owners, np.arange(len(owners)) + shifts[owners]
