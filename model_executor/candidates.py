"""Positions that a step may fill: masked ones, and with token editing decided ones too."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.step_plan import StepPlan, may_fill
from dllm_engine.model_executor.step_batch import StepBatch, ranges
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.logits import BiasedRows
from dllm_engine.model_executor.unmasking.statistics import (
    TokenStatistics,
    certainty_density,
)

ONLY_OBSERVED, UNFINISHED = 1, 2
"""Flags of candidates that no step of the batch may fill. ``ONLY_OBSERVED``: the
position is predicted for the layer pass, which observes it. ``UNFINISHED``: the row
left the pass early, so that its prediction means nothing."""


@dataclass
class BatchCandidates:
    """Positions that requests of a batch may fill, or that are predicted for the layer
    pass; ascending by request and position."""

    batch: StepBatch
    spans: Sequence[Span]
    """Per request of the batch, the span with its predicted positions."""
    members: Sequence[int]
    """Indices in the batch of the requests with predictions."""
    columns: np.ndarray
    """On the host, int64 ``[6, num_candidates]``. For each candidate: index of its
    request in the batch; index in the span of its request (positions that are only
    observed come last); canvas position; index in the ``CanvasStore``; batch row that
    predicts it; sum of ``ONLY_OBSERVED`` and ``UNFINISHED``."""
    table: Tensor
    """``columns`` on the device."""

    def __post_init__(self) -> None:
        (
            self.requests,
            self.offsets,
            self.positions,
            self.places,
            self.rows,
            self.flags,
        ) = self.table.unbind()

    @classmethod
    def of(
        cls, batch: StepBatch, observed: Callable[[StepPlan], Span | None]
    ) -> "BatchCandidates":
        """Candidates of the batch's plans. ``observed``: the method of the layer pass."""
        canvases = batch.canvases
        plans = batch.plans
        for_pass = [observed(plan) for plan in plans]
        spans = [
            plan.quota.candidates if span is None else span
            for plan, span in zip(plans, for_pass, strict=True)
        ]
        members = [
            i
            for i, plan in enumerate(plans)
            if for_pass[i] is not None or may_fill(plan, canvases[i].spec)
        ]
        parts = [np.empty(0, dtype=np.int64)]
        for i in members:
            span = slice(*spans[i])
            predicted = canvases[i].known[span] < 0
            edits = canvases[i].spec.unmasking.edit_threshold is not None
            if edits or plans[i].quota.verifies:
                predicted[:] = True
            elif plans[i].quota.left is not None:
                predicted = canvases[i].began_masked[span]
            parts.append(np.flatnonzero(predicted))
        requests = np.repeat(
            np.array(members, dtype=np.int64), [len(part) for part in parts[1:]]
        )
        offsets = np.concatenate(parts)
        longest = max(canvas.layout.canvas_length for canvas in canvases)
        per_request = [
            (
                plan.quota.candidates.start,
                canvas.start,
                # If a pass computes only the window, no row is before the first
                # position. With shifted logits the first step of the window fills this
                # position.
                plan.span.start if batch.computes(index, plan.span) else 0,
                plan.quota.candidates.size,
                plan.quota.verifies or canvas.layout.shifts_logits,
            )
            for index, (plan, canvas) in enumerate(zip(plans, canvases, strict=True))
        ]
        start, canvas_start, first_fed, num_fillable, shift = np.array(per_request)[
            requests
        ].T
        positions = start + offsets
        predicting = np.maximum(positions - shift, first_fed)
        # Rows ascend by request and position, and so do these keys.
        keys = (
            np.repeat(np.arange(len(canvases)), batch.sizes) * longest
            + batch.host_positions
        )
        predicting_keys = requests * longest + predicting
        rows = np.searchsorted(keys, predicting_keys).clip(max=len(keys) - 1)
        flags = (offsets >= num_fillable) * ONLY_OBSERVED
        columns = np.stack(
            (requests, offsets, positions, positions + canvas_start, rows, flags)
        )
        columns = columns[:, keys[rows] == predicting_keys]
        return cls(batch, spans, members, columns, on_device(columns, batch.device))

    def of_finished(
        self, finished: Tensor, num_finished: Sequence[int]
    ) -> "BatchCandidates":
        """Select the candidates that a ``finished`` row (bool ``[num_rows]``) predicts.
        A request has at most ``num_finished`` of them. Only the device knows which rows
        are finished, and the host does not wait for it: each request gets its maximum
        number of candidates, and surplus ones come last and are ``UNFINISHED``. So only
        the requests in ``columns`` are right."""
        numbers = np.arange(self.columns.shape[1]) - self.bounds[self.columns[0]]
        is_selected = numbers < np.array(num_finished)[self.columns[0]]
        unfinished = ~finished[self.rows]
        # Finished candidates of a request come first, in order.
        ordered = (2 * self.requests + unfinished).sort(stable=True).indices
        order = ordered[on_device(np.flatnonzero(is_selected), self.table.device)]
        selected = replace(
            self, columns=self.columns[:, is_selected], table=self.table[:, order]
        )
        selected.flags |= unfinished[order] * UNFINISHED
        selected.certainty = None if self.certainty is None else self.certainty[order]
        return selected

    def of_requests(self, members: Sequence[int]) -> "BatchCandidates":
        """Select the candidates of these requests."""
        if len(members) == len(self.members):
            return self
        columns = self.columns[:, np.isin(self.columns[0], members)]
        return replace(
            self,
            members=members,
            columns=columns,
            table=on_device(columns, self.table.device),
        )

    def by_settings(self) -> list["BatchCandidates"]:
        """Groups of candidates that go through the head together."""
        members: dict[Hashable, list[int]] = defaultdict(list)
        for index in self.members:
            canvas = self.batch.canvases[index]
            is_constrained = canvas.constrained is not None
            decides = canvas.decision is not None
            members[canvas.settings, is_constrained, decides].append(index)
        return [self.of_requests(indices) for indices in members.values()]

    @property
    def decides(self) -> bool:
        """True for a group of decisions."""
        return self.batch.canvases[self.members[0]].decision is not None

    @cached_property
    def bounds(self) -> np.ndarray:
        """Index of the first candidate of each request of the batch, and last the
        number of candidates.
        """
        return np.searchsorted(self.columns[0], range(len(self.batch.plans) + 1))

    def rows_of(self, index: int) -> slice:
        """The candidates of a request."""
        return slice(*self.bounds[index : index + 2].tolist())

    @property
    def width(self) -> int:
        """Upper bound of ``offsets``, exclusive."""
        return max(self.spans[i].size for i in self.members)

    @cached_property
    def certainty(self) -> Tensor | None:
        """Factor of each candidate's confidence from the certainty prior of its
        request, float32 ``[num_candidates]``, by the tokens that are known before the
        step; None: no request has a prior."""
        sigmas = {
            i: sigma
            for i in self.members
            if (sigma := self.batch.canvases[i].spec.unmasking.certainty_sigma)
            is not None
        }
        if not sigmas:
            return None
        weights = np.ones(self.columns.shape[1], dtype=np.float32)
        for i, sigma in sigmas.items():
            canvas = self.batch.canvases[i]
            request_rows = self.rows_of(i)
            start = canvas.layout.prompt_length
            weights[request_rows] = certainty_density(canvas.known[start:] >= 0, sigma)[
                self.columns[2, request_rows] - start
            ]
        return on_device(weights, self.table.device, torch.float32)

    @cached_property
    def responses(self) -> Tensor | None:
        """Request and place of every position in responses that delay end tokens, int64
        ``[2, n]``; None: there is no such response."""
        canvases = self.batch.canvases
        delaying = [i for i in self.members if canvases[i].spec.ends.delay_eos]
        if not delaying:
            return None
        starts = [
            canvases[i].start + canvases[i].layout.prompt_length for i in delaying
        ]
        owners, places = ranges(
            starts, [canvases[i].layout.gen_length for i in delaying]
        )
        return on_device(
            np.stack((np.array(delaying)[owners], places)), self.table.device
        )

    @cached_property
    def biased(self) -> list[BiasedRows]:
        """Biases that requests add to the logits of their candidates."""
        return [
            BiasedRows(
                (self.requests == i)
                & (self.positions >= bias.start)
                & (self.positions < bias.stop),
                bias,
            )
            for i in self.members
            for bias in self.batch.canvases[i].spec.token_biases
        ]

    def split(
        self, statistics: TokenStatistics
    ) -> Iterator[tuple[int, Tensor, TokenStatistics]]:
        """For each request with candidates, yield its index in the batch, and the
        positions and statistics of its candidates.
        """
        sizes = np.diff(self.bounds).tolist()
        parts = zip(self.positions.split(sizes), statistics.split(sizes), strict=True)
        for index, (positions, request_statistics) in enumerate(parts):
            if positions.numel():
                yield index, positions, request_statistics
