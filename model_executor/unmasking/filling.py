"""Filling in: prediction of candidates, and choice of the ones that a step fills.

``FillWork`` is what the host decides: it is equal in most steps. ``FillInputs`` has the
numbers that differ, in tensors. So one function launches a step, or replays the
recording of equal work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm_engine.decoding.spec import DecodingSpec
from dllm_engine.decoding.step_plan import StepPlan, UnmaskQuota
from dllm_engine.decoding.unmasking_policies import (
    PARALLEL_RULES,
    Measure,
    UnmaskingPolicy,
)
from dllm_engine.kernels.sampling import NO_TOKEN, Counters, gumbel_of, uniform
from dllm_engine.model_executor.candidates import UNFINISHED, BatchCandidates
from dllm_engine.model_executor.rank import Rank
from dllm_engine.model_executor.token_prediction import (
    NO_DEMANDS,
    Demands,
    SamplingSettings,
    Wanted,
)
from dllm_engine.model_executor.transfer import on_host
from dllm_engine.model_executor.unmasking.selection import (
    Bounds,
    Cells,
    Rule,
    drawn_below,
    first_of_all,
    parallel_rule,
    select,
    up_to_first,
)
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics, required

CHOSEN, NOT_FINITE, OBSERVED, TAKEN_BACK = 1, 2, 4, 8

Filled = Tensor
"""Result of a step for some candidates, int64 ``[4, num_candidates]``, ascending by
request and position: index of the request in the batch, canvas position, token, and a
sum of ``CHOSEN`` (the position was filled or its token replaced), ``OBSERVED`` (it has
the confidence that the quota asks for), ``TAKEN_BACK`` (it is a mask again) and
``NOT_FINITE`` (the logits were not finite)."""


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step for the requests of a batch, by their index in the batch."""

    positions: list[list[int]]
    """Positions filled or replaced in each request, ascending."""
    tokens: list[list[int]]
    """Tokens at these positions."""
    taken_back: dict[int, list[int]]
    """Positions of each request that are masks again, ascending."""
    farthest: dict[int, int]
    """Rightmost ``OBSERVED`` position of each request that has one."""
    not_finite: set[int]
    """Requests for which the model made logits that are NaN or infinite."""


def outcomes_of(
    filled: list[list[Filled]], num_requests: int, tensors: Sequence[Tensor] = ()
) -> tuple[list[StepOutcome], list[np.ndarray]]:
    """The outcome of each step, and host copies of other ``tensors``. Waits for the
    device once.
    """
    parts = list(chain.from_iterable(filled))
    requests = range(num_requests)
    outcomes = [
        StepOutcome([[] for _ in requests], [[] for _ in requests], {}, {}, set())
        for _ in filled
    ]
    if not parts:
        return outcomes, on_host(tensors)
    columns, *arrays = on_host([torch.cat(parts, dim=1), *tensors])
    stop = 0
    for outcome, step_parts in zip(outcomes, filled, strict=True):
        start = stop
        stop += sum(part.shape[1] for part in step_parts)
        flags = columns[3, start:stop]
        for request, position, token in columns[:3, start:stop][
            :, flags & CHOSEN > 0
        ].T.tolist():
            outcome.positions[request].append(position)
            outcome.tokens[request].append(token)
        if (flags > CHOSEN).any():
            for request, position in columns[:2, start:stop][
                :, flags & TAKEN_BACK > 0
            ].T.tolist():
                outcome.taken_back.setdefault(request, []).append(position)
            # Positions of a request ascend.
            outcome.farthest.update(
                columns[:2, start:stop][:, flags & OBSERVED > 0].T.tolist()
            )
            outcome.not_finite.update(
                columns[0, start:stop][flags == NOT_FINITE].tolist()
            )
    return outcomes, arrays


Choice = tuple[Measure, Rule]
"""Measure and rule by which requests choose positions."""


class Number(IntEnum):
    """Numbers of a request that filling in reads: rows of ``RequestNumbers``."""

    SEED = 0
    FORWARD = 1
    GUARANTEED = 2
    """At least one candidate with an offset below this is filled; 0: the rule decides.
    """
    LEAST = 3
    """Minimum number of filled candidates; 0: the rule decides."""
    ENOUGH = 4
    """If the rule allows fewer candidates than this, one is filled; 0: no such minimum.
    """
    DELAYS_EOS = 5
    CHOICE = 6
    """Index of the request's choice in ``FillWork.choices``; −1: a guide chooses."""
    VALUE = 7
    """Value of the choice's rule."""
    ALG_TEMP = 8
    OBSERVED = 9
    """Confidence from which a candidate is observed."""
    EDITED = 10
    """Probability above which the token of a decided candidate is replaced."""
    BEGINS_DECIDED = 11
    """1 for a step that is planned to begin without a mask. Any other step without a
    mask does nothing.
    """
    TAKES_BACK = 12
    """1 if decided candidates that are not chosen become masks again."""
    VERIFIES = 13
    """1 if predictions verify drafts: the first draft that differs is replaced, and the
    drafts behind it become masks again.
    """


_SWITCHED = (
    Number.GUARANTEED,
    Number.LEAST,
    Number.ENOUGH,
    Number.DELAYS_EOS,
    Number.ALG_TEMP,
    Number.TAKES_BACK,
    Number.VERIFIES,
)
"""Numbers that are 0 if a request does not use them."""
_BOUNDS = (Number.OBSERVED, Number.EDITED)
"""Numbers that are infinite if a request does not use them."""
_FLOATS = frozenset((Number.VALUE, Number.ALG_TEMP, *_BOUNDS))
"""Numbers that are float64."""


@dataclass(frozen=True, slots=True)
class RequestNumbers:
    """Numbers of the requests of a batch, on the host or the device. They are one int64
    table, so that one copy moves them to the device. Numbers of ``_FLOATS`` are stored
    by their bits.
    """

    table: Any
    """int64 ``[len(Number), num_requests]``: an array or a tensor."""

    @classmethod
    def zeros(cls, num_requests: int) -> "RequestNumbers":
        """Zeros on the host."""
        return cls(np.zeros((len(Number), num_requests), dtype=np.int64))

    def __getitem__(self, number: Number) -> Any:
        """View of one number of all requests."""
        row = self.table[number]
        if number not in _FLOATS:
            return row
        is_array = isinstance(row, np.ndarray)
        return row.view(np.float64 if is_array else torch.float64)


class FillWork(NamedTuple):
    """The part of filling in that the host decides. Steps of equal work differ only in
    their numbers.
    """

    settings: SamplingSettings
    choices: tuple[Choice, ...]
    wanted: Wanted
    """Statistics that any of the requests needs, including guided requests."""
    uses: frozenset[Number]
    """Numbers that some request uses."""

    @property
    def draws_positions(self) -> bool:
        """True if a choice needs a random number of each position."""
        return "noise" in self.wanted.measures or Number.ALG_TEMP in self.uses

    @property
    def takes_back(self) -> bool:
        """True if decided candidates may become masks again."""
        return bool(self.uses & {Number.TAKES_BACK, Number.VERIFIES})


@dataclass
class FillInputs:
    """Tensors that filling in reads on the device. All but ``numbers`` come from
    ``BatchCandidates``, under the same names.
    """

    table: Tensor
    """int64 ``[6, num_candidates]``"""
    numbers: RequestNumbers
    certainty: Tensor | None
    """float32 ``[num_candidates]``"""
    responses: Tensor | None
    """int64 ``[2, n]``"""
    width: int


def fill_work(
    group: BatchCandidates, plans: Sequence[StepPlan]
) -> tuple[FillWork, RequestNumbers]:
    """The work of a step for candidates of equal settings, and the numbers of its
    requests on the host. ``plans`` are in batch order."""
    canvases = group.batch.canvases
    specs = [canvas.spec for canvas in canvases]
    numbers = RequestNumbers.zeros(len(plans))
    rows = [numbers[number] for number in Number]
    rows[Number.CHOICE].fill(-1)
    for number in _BOUNDS:
        rows[number].fill(np.inf)
    choices: dict[Choice, int] = {}
    for i in group.members:
        spec = specs[i]
        quota = plans[i].quota
        if quota.verifies:
            rows[Number.VERIFIES][i] = 1
        elif spec.guidance is None:
            rule, rows[Number.VALUE][i] = _rule(quota, spec.unmasking.policy)
            if quota.left is not None:
                num_candidates = group.bounds[i + 1] - group.bounds[i]
                rows[Number.VALUE][i] = num_candidates - quota.left
                rows[Number.TAKES_BACK][i] = 1
            choice = spec.unmasking.policy.measures, rule
            rows[Number.CHOICE][i] = choices.setdefault(choice, len(choices))
        needs_first = (
            quota.first_needed and canvases[i].known[quota.candidates.start] < 0
        )
        for number, value in _numbers_of(spec, plans[i], needs_first):
            rows[number][i] = value
    uses = {number for number in _SWITCHED if rows[number].any()}
    uses.update(number for number in _BOUNDS if (rows[number] < np.inf).any())
    if len(choices) > 1 or (rows[Number.CHOICE][group.members] < 0).any():
        uses.add(Number.CHOICE)
    members = [specs[i] for i in group.members]
    measures = frozenset(spec.unmasking.policy.measures for spec in members)
    kept = [
        spec.reports.num_logprobs_kept
        for spec in members
        if spec.reports.num_logprobs_kept is not None
    ]
    settings = canvases[group.members[0]].settings
    wanted = Wanted(measures, max(kept, default=None))
    work = FillWork(settings, tuple(choices), wanted, frozenset(uses))
    if work.draws_positions or settings.temperature > 0:
        rows[Number.SEED][:] = [canvas.seed for canvas in canvases]
        # In rounds of self-speculation, tokens must not depend on the drafts.
        rows[Number.FORWARD][:] = [
            0 if spec.layout.round_length else plan.forward
            for spec, plan in zip(specs, plans, strict=True)
        ]
    return work, numbers


def _numbers_of(
    spec: DecodingSpec, plan: StepPlan, needs_first: bool
) -> Iterator[tuple[Number, float]]:
    """Numbers of a request's step that do not depend on other requests.
    ``needs_first``: the first candidate is masked and must be filled now.
    """
    quota = plan.quota
    unmasking = spec.unmasking
    if needs_first:
        yield Number.GUARANTEED, 1
    elif quota.guaranteed is not None:
        yield Number.GUARANTEED, quota.guaranteed.stop - quota.candidates.start
    if quota.parallel is not None:
        may_pass_none = PARALLEL_RULES[quota.parallel.kind].may_pass_none
        yield Number.LEAST, quota.least if may_pass_none else max(quota.least, 1)
    if quota.enough > 2:  # if only one is allowed, it is the most confident anyway
        yield Number.ENOUGH, quota.enough
    yield Number.DELAYS_EOS, spec.ends.delay_eos
    yield Number.ALG_TEMP, unmasking.alg_temp
    if quota.observed is not None:
        yield Number.OBSERVED, quota.observed
    if unmasking.edit_threshold is not None:
        yield Number.EDITED, unmasking.edit_threshold
        yield Number.BEGINS_DECIDED, plan.post_step > 0


def fill(
    rank: Rank,
    work: FillWork,
    inputs: FillInputs,
    hidden: Tensor,
    demands: Demands = NO_DEMANDS,
) -> tuple[Filled, TokenStatistics]:
    """Predict the candidates from their rows ``hidden`` ``[num_candidates,
    hidden_size]``, and unmask as many of the masked ones as the plans' quotas ask for.
    """
    requests, _, positions, places, _, flags = inputs.table.unbind()
    store, numbers, edits = rank.store, inputs.numbers, Number.EDITED in work.uses
    masked = store.masked[places]
    tokens = store.tokens[places]
    counters = None
    if work.draws_positions or work.settings.temperature > 0:
        seeds = numbers[Number.SEED]
        forwards = numbers[Number.FORWARD]
        counters = Counters(seeds[requests], forwards[requests], positions)
    if edits:
        surer_than = numbers[Number.EDITED].float()[requests]
        if demands.constrained:
            free = rank.predictor.predict(
                hidden, work.settings, counters, Wanted(), Demands(demands.biased)
            )
            options = _edit_options(free, tokens, masked, surer_than)
            demands = demands._replace(options=options)
    statistics = rank.predictor.predict(
        hidden, work.settings, counters, work.wanted, demands
    )
    if work.draws_positions and counters is not None:
        no_token = torch.full_like(positions, NO_TOKEN)
        statistics.noise = uniform(*counters, no_token)
    barred = flags > 0
    if inputs.responses is not None:
        statistics.held_back = _held_back(rank, inputs, statistics.token)
        barred = barred | statistics.held_back
    written = masked
    edited = None
    if edits:
        begun = numbers[Number.BEGINS_DECIDED]
        due = begun.index_add(0, requests, masked.long()) > 0
        edited = ~masked & ~barred & due[requests] & (statistics.token != tokens)
        if not demands.constrained:
            edited &= statistics.probability > surer_than
        written = masked | edited
    # A step that runs ahead may predict positions that are decided by now.
    statistics.written = written & (flags & UNFINISHED == 0)
    decided = ~masked
    takes_back = None
    if Number.TAKES_BACK in work.uses:
        takes_back = decided & (numbers[Number.TAKES_BACK][requests] > 0)
        decided &= ~takes_back
    chosen = _choose(work, inputs, statistics, barred | decided)
    if edited is not None:
        chosen |= edited
    taken_back = torch.zeros_like(chosen)
    if takes_back is not None:
        taken_back = takes_back & ~chosen
        chosen &= ~takes_back
    if Number.VERIFIES in work.uses:
        verifies = numbers[Number.VERIFIES]
        cells = Cells(requests, inputs.table[1], inputs.width)
        differs = masked | (statistics.token != tokens)
        verified = up_to_first(differs, cells, verifies.numel())
        verifying = verifies[requests] > 0
        chosen = torch.where(verifying, verified, chosen)
        taken_back |= verifying & ~masked & ~verified
        statistics.written = torch.where(verifying, verified, statistics.written)
    if work.takes_back:
        store.take_back(places, taken_back)
    store.fill(places, statistics.token, chosen)
    outcome = _outcome(work, inputs, statistics, chosen, taken_back)
    return torch.stack((requests, positions, statistics.token, outcome)), statistics


def _edit_options(
    free: TokenStatistics,
    tokens: Tensor,
    masked: Tensor,
    surer_than: Tensor,
) -> Tensor:
    """Tokens that a constrained position may have, int64 ``[num_candidates, 2]``; −1:
    any token. A decided token stays, or gives way to the ``free`` (unconstrained)
    prediction, so that the whole text matches.
    """
    gives_way = free.probability > surer_than
    others = torch.where(gives_way, free.token, tokens)
    return torch.stack((tokens, others), dim=1).masked_fill(masked[:, None], -1)


def _outcome(
    work: FillWork,
    inputs: FillInputs,
    statistics: TokenStatistics,
    chosen: Tensor,
    taken_back: Tensor,
) -> Tensor:
    """Outcome of each candidate as in ``Filled``, int64 ``[num_candidates]``."""
    requests = inputs.table[0]
    flags = inputs.table[5]
    outcome = chosen.long() * CHOSEN + taken_back.long() * TAKEN_BACK
    if Number.OBSERVED in work.uses:
        bounds = inputs.numbers[Number.OBSERVED].float()[requests]
        is_observed = (statistics.probability >= bounds) & (flags == 0)
        outcome = outcome + is_observed.long() * OBSERVED
    # NaN or infinity among the logits of a row makes all of its probabilities NaN.
    return outcome.masked_fill(statistics.probability.isnan(), NOT_FINITE)


def _choose(
    work: FillWork,
    inputs: FillInputs,
    statistics: TokenStatistics,
    barred: Tensor,
) -> Tensor:
    """Choose the candidates that a step fills among those that are not ``barred``; bool
    ``[num_candidates]``.
    """
    requests = inputs.table[0]
    offsets = inputs.table[1]
    numbers = inputs.numbers
    uses = work.uses
    bounds = Bounds(
        *(
            numbers[number] if number in uses else None
            for number in (Number.GUARANTEED, Number.LEAST, Number.ENOUGH)
        )
    )
    chosen = torch.zeros_like(barred)
    for choice, (measure, rule) in enumerate(work.choices):
        confidence = statistics.confidence(measure, offsets)
        if inputs.certainty is not None:
            confidence = confidence * inputs.certainty
        if Number.ALG_TEMP in uses:
            # The largest sums are draws without replacement from the softmax of
            # confidences over temperatures.
            gumbel = gumbel_of(required(statistics.noise))
            confidence = confidence + numbers[Number.ALG_TEMP][requests] * gumbel
        others = barred
        if Number.CHOICE in uses:
            others = barred | (numbers[Number.CHOICE][requests] != choice)
        confidence = confidence.masked_fill(others, -torch.inf)
        values = numbers[Number.VALUE].to(confidence.dtype)
        cells = Cells(requests, offsets, inputs.width)
        chosen |= select(rule, confidence, cells, values, bounds)
    return chosen


def _held_back(rank: Rank, inputs: FillInputs, tokens: Tensor) -> Tensor:
    """Predicted end tokens that must wait, because the request delays end tokens, the
    position before is masked, and the response has no end token yet; bool
    ``[num_candidates]``."""
    owners, places = required(inputs.responses)
    delays = inputs.numbers[Number.DELAYS_EOS]
    ends = torch.isin(rank.store.tokens[places], rank.end_tokens)
    num_ends = torch.zeros_like(delays).index_add_(0, owners, ends.long())
    delayed = (delays > 0) & (num_ends == 0)
    after_mask = rank.store.masked[inputs.table[3] - 1]
    return torch.isin(tokens, rank.end_tokens) & after_mask & delayed[inputs.table[0]]


def _rule(quota: UnmaskQuota, policy: UnmaskingPolicy) -> tuple[Rule, float]:
    """The rule by which a request's positions are chosen, and its value."""
    if quota.parallel is not None:
        return parallel_rule(quota.parallel.kind), quota.parallel.value
    if policy.draws_each_position:
        return drawn_below, quota.ratio
    return first_of_all, quota.count
