"""The masked positions that a step may fill."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch

from dllm_engine.model_executor.canvas_store import CanvasStore
from dllm_engine.model_executor.step_batch import Canvas, StepBatch, ranges
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.rules import PARALLEL_RULES, Rule, drawn_below, first_of_all
from dllm_engine.model_executor.unmasking.selection import select
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics
from dllm_engine.scheduler.step_plan import RowRule, StepPlan, UnmaskQuota, may_fill
from dllm_engine.scheduler.unmasking import UNMASKING_POLICIES


@dataclass(frozen=True)
class Candidates:
    """Masked positions that one request may fill."""

    index: int
    """Number of the request in the batch."""
    request_id: str
    canvas: Canvas
    plan: StepPlan
    positions: torch.Tensor
    """``[num_candidates]``, in the canvas."""


CHOSEN, NOT_FINITE = 1, 2


class Filled(NamedTuple):
    """What a step filled of some candidates; one entry per candidate, ascending by request and position."""

    requests: torch.Tensor
    """Numbers in the batch."""
    positions: torch.Tensor
    """In their canvases."""
    outcome: torch.Tensor
    """int64: ``CHOSEN`` where it filled one, ``NOT_FINITE`` where the model's logits were not."""


@dataclass(frozen=True)
class BatchCandidates:
    """Masked positions that requests of a batch may fill, ascending by request and position."""

    batch: StepBatch
    members: Sequence[int]
    """Batch numbers of the requests that may fill any."""
    table: torch.Tensor
    """int64 ``[5, num_candidates]``: the columns below, in their order."""

    @cached_property
    def requests(self) -> torch.Tensor:
        """Batch number of each candidate's request."""
        return self.table[0]

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Place in the plan's span of candidates."""
        return self.table[1]

    @cached_property
    def positions(self) -> torch.Tensor:
        """Canvas position."""
        return self.table[2]

    @cached_property
    def places(self) -> torch.Tensor:
        """Index into the ``CanvasStore``."""
        return self.table[3]

    @cached_property
    def rows(self) -> torch.Tensor:
        """Batch row that predicts the candidate."""
        return self.table[4]

    @classmethod
    def of(cls, batch: StepBatch, store: CanvasStore) -> "BatchCandidates":
        """All masked candidates of the plans that some row of the batch predicts."""
        device = batch.positions.device
        members = [i for i in range(len(batch.plans)) if may_fill(batch.plans[i], batch.canvases[i].spec)]
        spans = [batch.plans[i].quota.candidates for i in members]
        owners, positions = ranges([span.start for span in spans], [span.size for span in spans])
        requests = np.array(members, dtype=np.int64)[owners]
        of_requests = [
            (
                plan.quota.candidates.start,
                canvas.start,
                # The first position of a block-only forward has no row before it; Dream fills it in the block's first
                # step.
                plan.span.start if plan.rows is RowRule.ALL else 0,
                0 if batch.spans is None else first - batch.spans[i].start,
                first,
                stop,
            )
            for i, (plan, canvas, (first, stop)) in enumerate(
                zip(batch.plans, batch.canvases, pairwise(batch.cu_seqlens), strict=True)
            )
        ]
        start, canvas_start, first_fed, to_row, first, stop = np.array(of_requests)[requests].T
        rows = np.maximum(positions - int(batch.canvases[0].spec.shifts_logits), first_fed) + to_row
        columns = np.stack((requests, positions - start, positions, positions + canvas_start, rows))
        if batch.spans is not None and not all(plan.rows is RowRule.ALL for plan in batch.plans):
            columns = columns[:, (rows >= first) & (rows < stop)]
        found = cls(batch, members, on_device(columns, device))
        found = found.take(store.masked[found.places])
        if batch.spans is not None:
            return found
        # Masks chose the rows: so far each one's row is the position that predicts it. Rows ascend by request and
        # position, and so do these keys.
        longest = max(canvas.spec.canvas_length for canvas in batch.canvases)
        keys, wanted = batch.request_of_row() * longest + batch.positions, found.requests * longest + found.rows
        found.rows.copy_(torch.searchsorted(keys, wanted).clamp(max=keys.numel() - 1))
        return found.take(keys[found.rows] == wanted)

    def take(self, which: torch.Tensor) -> "BatchCandidates":
        """Select some, by indices ``[n]`` or by a bool mask."""
        return BatchCandidates(self.batch, self.members, self.table[:, which])

    def of_requests(self, members: Sequence[int]) -> "BatchCandidates":
        """Select the candidates of some members."""
        if len(members) == len(self.members):
            return self
        wanted = torch.isin(self.requests, on_device(members, self.table.device))
        return BatchCandidates(self.batch, members, self.table[:, wanted])

    def choose(self, statistics: TokenStatistics, masked: torch.Tensor) -> torch.Tensor:
        """Which candidates the plans' quotas unmask; bool ``[num_candidates]``.

        None of guided requests, where the guide decides, and none that is no longer ``masked`` ``[num_candidates]``.
        """
        barred = ~masked if statistics.held_back is None else ~masked | statistics.held_back
        plans, canvases = self.batch.plans, self.batch.canvases
        values: dict[tuple[str, Rule], dict[int, float]] = defaultdict(dict)
        for i in self.members:
            if canvases[i].spec.guidance is None:
                rule, value = _rule(plans[i].quota, canvases[i].spec.unmasking)
                values[canvases[i].spec.unmasking, rule][i] = value
        width = max(plans[i].quota.candidates.size for i in self.members)
        chosen = torch.zeros_like(self.requests, dtype=torch.bool)
        for (policy, rule), of_requests in values.items():
            confidence = statistics.confidence(UNMASKING_POLICIES[policy].measures).masked_fill(barred, -torch.inf)
            if len(of_requests) < len(self.members):
                others = [i not in of_requests for i in range(len(plans))]
                of_others = on_device(others, confidence.device, torch.bool)[self.requests]
                confidence = confidence.masked_fill(of_others, -torch.inf)
            of_all = [of_requests.get(i, 0.0) for i in range(len(plans))]
            chosen |= select(rule, confidence, self.requests, self.offsets, of_all, width)
        return chosen

    def split(self, statistics: TokenStatistics) -> Iterator[tuple[Candidates, TokenStatistics]]:
        """The candidates of each request that has any, with their statistics."""
        sizes = self.requests.bincount(minlength=len(self.batch.plans)).tolist()
        for index, (positions, of_request) in enumerate(
            zip(self.positions.split(sizes), statistics.split(sizes), strict=True)
        ):
            if positions.numel():
                batch = self.batch
                found = Candidates(
                    index, batch.request_ids[index], batch.canvases[index], batch.plans[index], positions
                )
                yield found, of_request


def _rule(quota: UnmaskQuota, policy: str) -> tuple[Rule, float]:
    """The rule by which a request's positions are chosen, and its value."""
    if quota.parallel is not None:
        return PARALLEL_RULES[quota.parallel.kind], quota.parallel.value
    if UNMASKING_POLICIES[policy].draws_each_position:
        return drawn_below, quota.ratio
    return first_of_all, quota.count


@dataclass(frozen=True)
class StepOutcome:
    """What a step did to the requests of a batch, by their numbers."""

    positions: list[list[int]]
    """Positions filled in each request, ascending."""
    not_finite: set[int]
    """Requests for which the model made logits that are NaN or infinite."""


def outcomes_of(filled: list[list[Filled]], num_requests: int) -> list[StepOutcome]:
    """The outcome of each step. Waits for the device once."""
    parts = list(chain.from_iterable(filled))
    found = [StepOutcome([[] for _ in range(num_requests)], set()) for _ in filled]
    if not parts:
        return found
    columns = torch.cat([torch.stack(part) for part in parts], dim=1)
    sizes = [sum(part.outcome.shape[0] for part in of_step) for of_step in filled]
    for of_step, (requests, positions, outcome) in zip(found, columns.cpu().split(sizes, dim=1), strict=True):
        kept = outcome == CHOSEN
        for request, position in zip(requests[kept].tolist(), positions[kept].tolist(), strict=True):
            of_step.positions[request].append(position)
        of_step.not_finite.update(requests[outcome == NOT_FINITE].tolist())
    return found
