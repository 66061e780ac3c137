"""The rows of one forward pass: all scheduled requests, flattened."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, takewhile

import numpy as np
import torch
from torch import Tensor

from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.step_plan import RefreshState, Scope, StepPlan
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.transfer import on_device

RowPositions = Callable[[StepPlan, Canvas], np.ndarray]
"""The canvas positions of a plan's rows, ascending, on the host."""

Rows = Tensor | slice
"""Some rows of a batch: their indices, or a slice."""


class RowBounds:
    """Bounds of each request's rows in a batch whose rows lie end to end."""

    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device,
        limits: Tensor | None = None,
    ) -> None:
        """``limits``: number of its request's keys that each row attends to, int32
        ``[num_rows]``; None: all of them.
        """
        self.sizes, self.device, self.limits = sizes, device, limits
        self.bounds = list(accumulate(sizes, initial=0))
        """First row of each request and, last, the number of rows."""
        self.max_seqlen = max(sizes, default=0)
        self.is_padded = False
        """True if only ``cu_seqlens`` has the bounds."""

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The bounds on the device, int32."""
        return on_device(self.bounds, self.device, torch.int32)

    def rows(self, index: int) -> slice:
        """Rows of a request."""
        return slice(self.bounds[index], self.bounds[index + 1])


class SplitRows(RowBounds):
    """Rows in two parts: the first requests attend to pages and to their own rows, the
    last ones only to their own rows.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        alone: Sequence[bool],
        device: torch.device,
        limits: Tensor | None = None,
    ) -> None:
        """``alone``: True for each request that needs no pages. A request before one
        that needs pages counts as needing them.
        """
        super().__init__(sizes, device, limits)
        num_alone = len(list(takewhile(bool, reversed(alone))))
        num_paged = len(sizes) - num_alone
        self.num_paged_rows = n = self.bounds[num_paged]
        paged_limits, alone_limits = (
            (None, None) if limits is None else (limits[:n], limits[n:])
        )
        self.paged = RowBounds(
            [*sizes[:num_paged], *[0] * num_alone], device, paged_limits
        )
        """Rows of all requests; requests that attend alone have no rows here."""
        self.alone = RowBounds(sizes[num_paged:], device, alone_limits)
        """Rows of the requests that attend alone, which follow the first
        ``num_paged_rows``.
        """

    def graph_inputs(self) -> list[Tensor]:
        return [part.cu_seqlens for part in (self.paged, self.alone) if any(part.sizes)]


class RowChoice:
    """Computed rows of each request: fixed rows, and behind them rows that are chosen
    from others.
    """

    def __init__(
        self,
        fixed: Sequence[Span],
        others: Sequence[Span],
        counts: Sequence[int | None],
        device: torch.device,
    ) -> None:
        """``fixed``, ``others`` and ``counts`` have an entry for each request.
        ``counts``: number of ``others`` that are chosen; None: the request has no
        choice.
        """
        fixed_sizes = [span.size for span in fixed]
        self.sizes = [
            size + (count or 0) for size, count in zip(fixed_sizes, counts, strict=True)
        ]
        firsts = [0, *accumulate(self.sizes)]
        places = (
            ranges([span.start for span in fixed], fixed_sizes)[1],
            ranges(firsts[:-1], fixed_sizes)[1],
        )
        self.fixed, self.fixed_places = on_device(np.stack(places), device).unbind()
        """The fixed rows, and their places among the computed rows."""
        by_shape: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for span, first, size, count in zip(
            others, firsts, fixed_sizes, counts, strict=False
        ):
            if count is not None:
                by_shape[span.size, count].append((span.start, first + size))
        spans = [
            (start, size)
            for (size, _), members in by_shape.items()
            for start, _ in members
        ]
        self.chosen_from = ranges(
            [start for start, _ in spans], [size for _, size in spans]
        )[1]
        """The rows to choose from, group after group, on the host."""
        self.groups = []
        """Per group of equal shape, the rows to choose from ``[group, rows]``, and the
        places of the chosen rows ``[group, chosen]``."""
        for (size, count), members in by_shape.items():
            starts, first_places = on_device(members, device)[:, None].unbind(dim=2)
            numbers = torch.arange(max(size, count), device=device)
            self.groups.append(
                (starts + numbers[:size], first_places + numbers[:count])
            )

    def by_group(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Values, rows to choose from, and places of the chosen rows, for each group.
        ``values`` ``[..., n]`` belong to the rows ``chosen_from`` and become ``[...,
        group, rows]``."""
        parts = values.split([others.numel() for others, _ in self.groups], dim=-1)
        for part, (others, places) in zip(parts, self.groups, strict=True):
            yield part.unflatten(-1, others.shape), others, places

    def rows(self, values: Tensor, choose: Callable[..., Tensor]) -> Tensor:
        """The computed rows. ``choose(values, count=count)`` gives the indices of the
        chosen rows, ``[group, count]``, from the values of a group."""
        rows = torch.empty(sum(self.sizes), dtype=torch.int64, device=self.fixed.device)
        rows[self.fixed_places] = self.fixed
        for part, others, places in self.by_group(values):
            rows[places] = others.gather(1, choose(part, count=places.shape[1]))
        return rows

    def graph_inputs(self) -> list[Tensor]:
        return [
            self.fixed,
            self.fixed_places,
            *(tensor for group in self.groups for tensor in group),
        ]


class StepBatch(RowBounds):
    """Requests in batch order, and the rows that they compute."""

    def __init__(
        self,
        canvases: list[Canvas],
        positions: Sequence[np.ndarray],
        plans: Sequence[StepPlan] = (),
        request_ids: Sequence[str] = (),
    ) -> None:
        """``positions``: positions of each request's rows in its canvas, ascending.
        Rows of another text (a guide's) have no plans."""
        super().__init__(
            [request_positions.size for request_positions in positions],
            canvases[0].tokens.device,
        )
        self.canvases = canvases
        self.request_ids = request_ids
        self.plans = plans
        """Plans for which the rows were laid out. Steps that do the same work on other
        tokens run with these rows too. Their plans differ in the number of tokens to
        fill and in random numbers."""
        self.host_positions = np.concatenate(positions)
        """``positions`` on the host."""
        places = self.host_positions + np.repeat(
            [canvas.start for canvas in canvases], self.sizes
        )
        self.positions, self.places = on_device(
            np.stack((self.host_positions, places)), self.device
        ).unbind()
        """``[num_rows]`` each: the row's position in the canvas, and the index of its
        token in the ``CanvasStore``.
        """
        self.limits = self._limits()
        """The canvas position before which each row's block ends; None where all rows
        of a request attend to each other. Keys that lie by position are limited by it.
        """

    @classmethod
    def of(
        cls,
        plans: dict[str, StepPlan],
        canvases: dict[str, Canvas],
        positions: RowPositions,
    ) -> "StepBatch":
        """The rows of all plans, request by request. ``positions`` is the layer pass's
        method.
        """
        rows = {
            request_id: positions(plan, canvases[request_id])
            for request_id, plan in plans.items()
        }
        # Sequences of equal length side by side share one attention call. Those that
        # need no pages come last: requests in their first pass, and before them others
        # whose canvas is computed as a whole.
        ordered = sorted(
            plans,
            key=lambda i: (
                plans[i].scope is Scope.ALL,
                plans[i].forward == 0,
                rows[i].size,
                plans[i].read,
            ),
        )
        return cls(
            [canvases[i] for i in ordered],
            [rows[i] for i in ordered],
            [plans[i] for i in ordered],
            ordered,
        )

    def _limits(self) -> Tensor | None:
        specs = [canvas.spec for canvas in self.canvases]
        if any(spec.layout.attention == "full" for spec in specs):
            return None
        blocks = []
        for spec, plan in zip(specs, self.plans, strict=True):
            layout = spec.layout
            causal_stop = 0
            stop = 0
            if layout.attention == "causal":
                block = layout.from_block_start(plan.window)
                causal_stop = block.stop if plan.quota.verifies else block.start
                stop = block.stop
            blocks.append((layout.attended_length, layout.lead, causal_stop, stop))
        lengths, leads, causal_stops, stops = np.repeat(blocks, self.sizes, axis=0).T
        rows = self.host_positions
        ends = rows - (rows + leads) % lengths + lengths
        ends = np.where(stops > 0, stops, ends)
        ends = np.where(rows < causal_stops, rows + 1, ends)
        bounds = np.array(self.bounds)
        # If each request has rows of one block, they see all rows before them.
        if np.array_equal(ends[bounds[:-1]], ends[bounds[1:] - 1]):
            return None
        return on_device(ends, self.device, torch.int32)

    def computes(self, index: int, span: Span) -> bool:
        """Return True if the rows of a request are exactly the positions of ``span``."""
        return (
            self.sizes[index] == span.size
            and self.host_positions[self.bounds[index]] == span.start
        )

    @property
    def only_reuses(self) -> bool:
        """True if no request refreshes its cache."""
        return all(plan.state is RefreshState.REUSE for plan in self.plans)

    def places_in(self, spans: Sequence[Span]) -> np.ndarray:
        """Place of each row in a span of its request, below 0 outside; on the host."""
        starts, stops = np.repeat(np.array(spans), self.sizes, axis=0).T
        rows = self.host_positions
        return np.where(rows < stops, rows - starts, -1)

    def computes_all(self, lengths: Sequence[int]) -> list[bool]:
        """Return True for each request that computes all tokens that it attends to
        (``lengths``): pages would give back what was just computed.
        """
        return [
            size == length for size, length in zip(self.sizes, lengths, strict=True)
        ]

    def split_rows(self, alone: Sequence[bool]) -> SplitRows:
        return SplitRows(self.sizes, alone, self.device, self.limits)

    @cached_property
    def requests(self) -> Tensor:
        """``[num_rows]`` int64: the request that each row belongs to."""
        return on_device(np.repeat(np.arange(len(self.sizes)), self.sizes), self.device)


def ranges(
    starts: Sequence[int], sizes: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate ranges of integers. Returns the range number of each integer, and the
    integers; int64 arrays.
    """
    bounds_of_ranges = np.array([starts, sizes], dtype=np.int64)
    owners = np.repeat(np.arange(len(sizes)), bounds_of_ranges[1])
    shifts = bounds_of_ranges[0] - bounds_of_ranges[1].cumsum() + bounds_of_ranges[1]
    return owners, np.arange(len(owners)) + shifts[owners]
