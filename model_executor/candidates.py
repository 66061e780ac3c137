"""The masked positions that a step may fill."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from dllm_engine.kernels.noise import gumbel_of
from dllm_engine.model_executor.step_batch import Canvas, StepBatch
from dllm_engine.model_executor.transfer import on_device, on_host
from dllm_engine.model_executor.unmasking.biased import BiasedRows
from dllm_engine.model_executor.unmasking.certainty import certainty_density
from dllm_engine.model_executor.unmasking.rules import SELECTION_RULES, Rule, drawn_below, first_of_all
from dllm_engine.model_executor.unmasking.selection import select
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics, required
from dllm_engine.scheduler.step_plan import RowRule, StepPlan, UnmaskQuota, may_fill
from dllm_engine.scheduler.unmasking_policies import UNMASKING_POLICIES, Measure


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


class Choice(NamedTuple):
    """Measure and rule by which requests choose positions."""

    measure: Measure
    rule: Rule


CHOSEN, NOT_FINITE, OBSERVED = 1, 2, 4


Filled = torch.Tensor
"""Result of a step for some candidates, int64 ``[4, num_candidates]``, ascending by request and position: request
number in the batch, canvas position, token, and a sum of ``CHOSEN`` (filled), ``OBSERVED`` (as the quota asks) and
``NOT_FINITE`` (the logits were not finite)."""


def filled_of(
    requests: torch.Tensor,
    positions: torch.Tensor,
    statistics: TokenStatistics,
    chosen: torch.Tensor,
    observed: torch.Tensor | None = None,
) -> Filled:
    """``chosen`` and ``observed`` are bool ``[num_candidates]``."""
    found = chosen if observed is None else chosen * CHOSEN + observed * OBSERVED
    # A NaN or an infinity among a row's logits makes every probability of the row NaN.
    outcome = found.long().masked_fill_(statistics.probability.isnan(), NOT_FINITE)
    return torch.stack((requests, positions, statistics.token, outcome))


@dataclass
class BatchCandidates:
    """Masked positions that requests of a batch may fill, or predict for their cache method alone, ascending by request
    and position."""

    batch: StepBatch
    members: Sequence[int]
    """Batch numbers of the requests with predictions."""
    columns: np.ndarray
    """int64 ``[5, num_candidates]``: the columns below, in their order, on the host."""

    requests: torch.Tensor = field(init=False)
    """Batch number of each candidate's request."""
    offsets: torch.Tensor = field(init=False)
    """Index in the plan's span of candidates; positions that are predicted only lie behind them."""
    positions: torch.Tensor = field(init=False)
    """Canvas position."""
    places: torch.Tensor = field(init=False)
    """Index into the ``CanvasStore``."""
    rows: torch.Tensor = field(init=False)
    """Batch row that predicts the candidate."""
    table: torch.Tensor = field(init=False)
    """All columns, as ``columns``, on the device."""
    spare: torch.Tensor | None = None
    """Candidates that repeat another one, bool ``[num_candidates]``; see ``of_finished``."""

    def __post_init__(self) -> None:
        self._take_table(on_device(self.columns, self.batch.positions.device))

    def _take_table(self, table: torch.Tensor) -> None:
        self.table = table
        self.requests, self.offsets, self.positions, self.places, self.rows = self.table.unbind()

    @classmethod
    def of(cls, batch: StepBatch) -> "BatchCandidates":
        """Masked candidates of the plans whose rows are in the batch."""
        canvases = batch.canvases
        plans = batch.plans
        members = [i for i, p in enumerate(plans) if p.predicts is not None or may_fill(p, canvases[i].spec)]
        spans = [plans[i].predicted for i in members]
        masked = [np.flatnonzero(canvases[i].known[slice(*span)] < 0) for i, span in zip(members, spans, strict=True)]
        requests = np.repeat(np.array(members, dtype=np.int64), [len(offsets) for offsets in masked])
        offsets = np.concatenate([*masked, np.empty(0, dtype=np.int64)])
        of_requests = [
            (
                plan.quota.candidates.start,
                canvas.start,
                # The first position of a pass over a window alone has no row before it; with shifted logits the
                # window's first step fills it.
                plan.span.start if plan.rows is RowRule.ALL else 0,
            )
            for plan, canvas in zip(plans, canvases, strict=True)
        ]
        start, canvas_start, first_fed = np.array(of_requests)[requests].T
        positions = start + offsets
        predicting = np.maximum(positions - int(canvases[0].spec.shifts_logits), first_fed)
        # Rows ascend by request and position, and so do these keys.
        longest = max(canvas.spec.canvas_length for canvas in canvases)
        keys = np.repeat(np.arange(len(canvases)), np.diff(batch.cu_seqlens)) * longest + batch.host_positions
        wanted = requests * longest + predicting
        rows = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        columns = np.stack((requests, offsets, positions, positions + canvas_start, rows))
        return cls(batch, members, columns[:, keys[rows] == wanted])

    def take(self, which: np.ndarray) -> "BatchCandidates":
        """Select some, by a bool mask ``[num_candidates]``."""
        return BatchCandidates(self.batch, self.members, self.columns[:, which])

    def of_finished(self, finished: torch.Tensor, num_finished: Sequence[int]) -> "BatchCandidates":
        """Select those that are predicted by a row of ``finished`` ``[num_rows]`` bool, of which a request has
        ``num_finished``.

        Which these are only the device knows, which is not waited for: each request gets as many candidates as it can
        have. Where it has fewer, the first one is repeated. So of ``columns`` just the requests are right.
        """
        sizes = np.bincount(self.columns[0], minlength=len(self.batch.plans))
        most = np.minimum(sizes, num_finished)
        numbers = np.arange(self.columns.shape[1]) - (sizes.cumsum() - sizes)[self.columns[0]]
        taken = numbers < most[self.columns[0]]
        firsts = (most.cumsum() - most)[self.columns[0, taken]]
        places, firsts = on_device(np.stack((np.flatnonzero(taken), firsts)), self.table.device).unbind()
        unfinished = ~finished[self.rows]
        # In each request the finished ones first, in their order.
        which = (2 * self.requests + unfinished).sort(stable=True).indices[places]
        found = self.take(taken)
        found.spare = unfinished[which]
        which = torch.where(found.spare, which[firsts], which)
        found._take_table(self.table[:, which])
        found.predicted_alone = unfinished[which]  # of a request that has none
        found.certainty = None if self.certainty is None else self.certainty[which]
        return found

    def of_requests(self, members: Sequence[int]) -> "BatchCandidates":
        """Select the candidates of some members."""
        if len(members) == len(self.members):
            return self
        return BatchCandidates(self.batch, members, self.columns[:, np.isin(self.columns[0], members)])

    @property
    def width(self) -> int:
        """Upper bound of ``offsets``, exclusive."""
        return max(self.batch.plans[i].predicted.size for i in self.members)

    @cached_property
    def certainty(self) -> torch.Tensor | None:
        """Factor of each candidate's confidence by the prior of its request, float32 ``[num_candidates]``, from the
        tokens known when the step was laid out; None: no request has a prior."""
        sigmas = {i: sigma for i in self.members if (sigma := self.batch.canvases[i].spec.certainty_sigma) is not None}
        if not sigmas:
            return None
        weights = np.ones(self.columns.shape[1], dtype=np.float32)
        for i, sigma in sigmas.items():
            canvas, mine = self.batch.canvases[i], self.columns[0] == i
            start = canvas.spec.prompt_length
            weights[mine] = certainty_density(canvas.known[start:] >= 0, sigma)[self.columns[2, mine] - start]
        return on_device(weights, self.table.device, torch.float32)

    @cached_property
    def biased(self) -> list[BiasedRows]:
        """Numbers that requests add to the logits of their candidates."""
        return [
            BiasedRows((self.requests == i) & (self.positions < bias.stop), *bias.columns)
            for i in self.members
            for bias in self.batch.canvases[i].spec.token_biases
        ]

    @cached_property
    def predicted_alone(self) -> torch.Tensor | None:
        """Candidates that no step of the batch may fill, bool ``[num_candidates]``; None where there are none."""
        if all(plan.predicts is None for plan in self.batch.plans):
            return None
        sizes = np.array([plan.quota.candidates.size for plan in self.batch.plans])
        alone = self.columns[1] >= sizes[self.columns[0]]
        return on_device(alone, self.table.device, torch.bool) if alone.any() else None

    def least(self) -> list[int]:
        """Minimum number of candidates that each plan fills if its rule fills fewer; 0: the rule decides."""
        return [plan.quota.least if plan.quota.parallel is not None else 0 for plan in self.batch.plans]

    def enough(self) -> list[int]:
        """Number of candidates that a rule must allow, or one is filled; 0: no such number."""
        return [plan.quota.enough if plan.quota.enough > 2 else 0 for plan in self.batch.plans]

    def observed(self, statistics: TokenStatistics) -> torch.Tensor | None:
        """Candidates as confident as their plan's quota asks for, bool ``[num_candidates]``; None where none does."""
        quotas = [plan.quota for plan in self.batch.plans]
        bounds = [torch.inf if quota.observed is None else quota.observed for quota in quotas]
        if min(bounds) == torch.inf:
            return None
        found = statistics.probability >= on_device(bounds, self.table.device, torch.float32)[self.requests]
        return found if self.predicted_alone is None else found & ~self.predicted_alone

    def choices(self) -> dict[Choice, dict[int, float]]:
        """Choices of the plans, with the rule's value for each request; guided requests are left out."""
        found: dict[Choice, dict[int, float]] = defaultdict(dict)
        for i in self.members:
            spec = self.batch.canvases[i].spec
            if spec.guidance is None:
                rule, value = _rule(self.batch.plans[i].quota, spec.unmasking)
                found[Choice(UNMASKING_POLICIES[spec.unmasking].measures, rule)][i] = value
        return found

    def guaranteed(self) -> list[int]:
        """Offset of each request below which its plan fills one candidate at least; 0 where it leaves that to the
        rule."""
        found = [0] * len(self.batch.plans)
        for i in self.members:
            quota, canvas = self.batch.plans[i].quota, self.batch.canvases[i]
            if quota.first_needed and canvas.known[quota.candidates.start] < 0:
                found[i] = 1
            elif quota.guaranteed is not None:
                found[i] = quota.guaranteed.stop - quota.candidates.start
        return found

    def choose(self, statistics: TokenStatistics, masked: torch.Tensor) -> torch.Tensor:
        """Candidates that the plans unmask, bool ``[num_candidates]``; only those that are still ``masked``
        ``[num_candidates]``."""
        offsets = self.guaranteed()
        guaranteed = on_device(offsets, masked.device) if any(offsets) else None
        numbers = self.least()
        least = on_device(numbers, masked.device) if any(numbers) else None
        numbers = self.enough()
        enough = on_device(numbers, masked.device) if any(numbers) else None
        barred = ~masked if statistics.held_back is None else ~masked | statistics.held_back
        if self.predicted_alone is not None:
            barred = barred | self.predicted_alone
        requests = range(len(self.batch.plans))
        alg_temps = [canvas.spec.alg_temp for canvas in self.batch.canvases]
        chosen = torch.zeros_like(self.requests, dtype=torch.bool)
        for (measure, rule), of_requests in self.choices().items():
            confidence = statistics.confidence(measure, self.offsets)
            if self.certainty is not None:
                confidence = confidence * self.certainty
            if any(alg_temps[i] for i in of_requests):
                # The largest of them are draws without replacement from the softmax of confidences over temperatures.
                temperatures = on_device(alg_temps, confidence.device, torch.float64)[self.requests]
                confidence = confidence + temperatures * gumbel_of(required(statistics.noise))
            confidence = confidence.masked_fill(barred, -torch.inf)
            if len(of_requests) < len(self.members):
                others = [i not in of_requests for i in requests]
                other_rows = on_device(others, confidence.device, torch.bool)[self.requests]
                confidence = confidence.masked_fill(other_rows, -torch.inf)
            values = on_device([of_requests.get(i, 0.0) for i in requests], confidence.device, confidence.dtype)
            chosen |= select(
                rule, confidence, self.requests, self.offsets, values, self.width, guaranteed, least, enough
            )
        return chosen

    def split(self, statistics: TokenStatistics) -> Iterator[tuple[Candidates, TokenStatistics]]:
        """The candidates of each request that has any, with their statistics."""
        sizes = np.bincount(self.columns[0], minlength=len(self.batch.plans)).tolist()
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
        return SELECTION_RULES[quota.parallel.kind], quota.parallel.value
    if UNMASKING_POLICIES[policy].draws_each_position:
        return drawn_below, quota.ratio
    return first_of_all, quota.count


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step for the requests of a batch, by their numbers."""

    positions: list[list[int]]
    """Positions filled in each request, ascending."""
    tokens: list[list[int]]
    """Tokens at these positions."""
    farthest: dict[int, int]
    """Rightmost position that was ``OBSERVED`` in a request, where any was."""
    not_finite: set[int]
    """Requests for which the model made logits that are NaN or infinite."""


def outcomes_of(
    filled: list[list[Filled]], num_requests: int, asked: Sequence[torch.Tensor] = ()
) -> tuple[list[StepOutcome], list[np.ndarray]]:
    """The outcome of each step, and the numbers of the tensors ``asked``. Waits for the device once."""
    parts = list(chain.from_iterable(filled))
    requests = range(num_requests)
    found = [StepOutcome([[] for _ in requests], [[] for _ in requests], {}, set()) for _ in filled]
    if not parts:
        return found, on_host(asked)
    columns, *answers = on_host([torch.cat(parts, dim=1), *asked])
    stop = 0
    for of_step, parts_of_step in zip(found, filled, strict=True):
        start, stop = stop, stop + sum(part.shape[1] for part in parts_of_step)
        outcome = columns[3, start:stop]
        for request, position, token in columns[:3, start:stop][:, outcome & CHOSEN > 0].T.tolist():
            of_step.positions[request].append(position)
            of_step.tokens[request].append(token)
        if (outcome > CHOSEN).any():
            # Positions of a request ascend.
            of_step.farthest.update(columns[:2, start:stop][:, outcome & OBSERVED > 0].T.tolist())
            of_step.not_finite.update(columns[0, start:stop][outcome == NOT_FINITE].tolist())
    return found, answers
