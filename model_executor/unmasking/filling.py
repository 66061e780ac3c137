"""Filling in: the predictions of candidates, and the choice of those that a step fills.

What the host decides, ``FillWork``, is the same in most steps; the numbers that differ
are in tensors, ``FillInputs``. So a step is launched, or replayed from what was
recorded for the same work, by one function.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from dllm_engine.decoding.step_plan import StepPlan, UnmaskQuota
from dllm_engine.decoding.unmasking_policies import (
    PARALLEL_RULES,
    Measure,
    UnmaskingPolicy,
)
from dllm_engine.kernels.sampling import NO_TOKEN, Counters, gumbel_of, uniform
from dllm_engine.model_executor.candidates import UNFINISHED, BatchCandidates
from dllm_engine.model_executor.canvas_store import CanvasStore
from dllm_engine.model_executor.token_prediction import SamplingSettings, TokenPredictor
from dllm_engine.model_executor.transfer import on_host
from dllm_engine.model_executor.unmasking.logits import BiasedRows, ConstrainedRows
from dllm_engine.model_executor.unmasking.selection import (
    Rule,
    drawn_below,
    first_of_all,
    parallel_rule,
    select,
)
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics, required

CHOSEN, NOT_FINITE, OBSERVED = 1, 2, 4

Filled = torch.Tensor
"""Result of a step for some candidates, int64 ``[4, num_candidates]``, ascending by
request and position: request number in the batch, canvas position, token, and a sum of
``CHOSEN`` (filled, or its token replaced), ``OBSERVED`` (as the quota asks) and
``NOT_FINITE`` (the logits were not finite)."""


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step for the requests of a batch, by their numbers."""

    positions: list[list[int]]
    """Positions filled or replaced in each request, ascending."""
    tokens: list[list[int]]
    """Tokens at these positions."""
    farthest: dict[int, int]
    """Rightmost position that was ``OBSERVED`` in a request, where any was."""
    not_finite: set[int]
    """Requests for which the model made logits that are NaN or infinite."""


def outcomes_of(
    filled: list[list[Filled]], num_requests: int, asked: Sequence[torch.Tensor] = ()
) -> tuple[list[StepOutcome], list[np.ndarray]]:
    """The outcome of each step, and the numbers of the tensors ``asked``. Waits for the
    device once.
    """
    parts = list(chain.from_iterable(filled))
    requests = range(num_requests)
    outcomes = [
        StepOutcome([[] for _ in requests], [[] for _ in requests], {}, set())
        for _ in filled
    ]
    if not parts:
        return outcomes, on_host(asked)
    columns, *answers = on_host([torch.cat(parts, dim=1), *asked])
    stop = 0
    for outcome, step_parts in zip(outcomes, filled, strict=True):
        start, stop = stop, stop + sum(part.shape[1] for part in step_parts)
        flags = columns[3, start:stop]
        for request, position, token in columns[:3, start:stop][
            :, flags & CHOSEN > 0
        ].T.tolist():
            outcome.positions[request].append(position)
            outcome.tokens[request].append(token)
        if (flags > CHOSEN).any():
            # Positions of a request ascend.
            outcome.farthest.update(
                columns[:2, start:stop][:, flags & OBSERVED > 0].T.tolist()
            )
            outcome.not_finite.update(
                columns[0, start:stop][flags == NOT_FINITE].tolist()
            )
    return outcomes, answers


Choice = tuple[Measure, Rule]
"""Measure and rule by which requests choose positions."""


class Number(IntEnum):
    """Rows of ``FillInputs.numbers``. Those after ``CHOICE`` are the bits of float64
    numbers.
    """

    SEED = 0
    FORWARD = 1
    GUARANTEED = 2
    """Offset below which one candidate is filled at least; 0: the rule decides."""
    LEAST = 3
    """Minimum number of filled candidates; 0: the rule decides."""
    ENOUGH = 4
    """Number of candidates that the rule must allow, or one is filled; 0: no such
    number.
    """
    DELAYS_EOS = 5
    CHOICE = 6
    """Number of the request's choice in ``FillWork.choices``; −1: a guide chooses."""
    VALUE = 7
    """Value of the choice's rule."""
    ALG_TEMP = 8
    OBSERVED = 9
    """Confidence from which a candidate is observed."""
    EDITED = 10
    """Probability above which the token of a decided candidate is replaced."""
    BEGINS_DECIDED = 11
    """1 for a step that is planned to begin without a mask. Another one that does has
    nothing to do.
    """


_SWITCHED = (
    Number.GUARANTEED,
    Number.LEAST,
    Number.ENOUGH,
    Number.DELAYS_EOS,
    Number.ALG_TEMP,
)
"""Numbers that are 0 where a request does not use them."""
_BOUNDS = (Number.OBSERVED, Number.EDITED)
"""Numbers that are infinite where a request does not use them."""


class FillWork(NamedTuple):
    """What filling in computes, as far as the host decides it; equal work differs in
    numbers alone.
    """

    settings: SamplingSettings
    choices: tuple[Choice, ...]
    measures: frozenset[Measure]
    """Measures of all requests, also of those that a guide fills."""
    num_logprobs: int | None
    uses: frozenset[Number]
    """Numbers that some request has."""

    @property
    def draws_positions(self) -> bool:
        """True if a choice needs a random number of each position."""
        return "noise" in self.measures or Number.ALG_TEMP in self.uses


@dataclass
class FillInputs:
    """What filling in reads on the device. All but ``numbers`` is of
    ``BatchCandidates``, under the same names.
    """

    table: torch.Tensor
    """int64 ``[6, num_candidates]``"""
    numbers: torch.Tensor
    """int64 ``[len(Number), num_requests]``"""
    certainty: torch.Tensor | None
    """float32 ``[num_candidates]``"""
    responses: torch.Tensor | None
    """int64 ``[2, n]``"""
    width: int


def fill_work(
    group: BatchCandidates, plans: Sequence[StepPlan]
) -> tuple[FillWork, np.ndarray]:
    """The work of a step's plans, in batch order, for candidates of equal settings, and
    ``FillInputs.numbers`` on the host."""
    canvases = group.batch.canvases
    specs = [canvas.spec for canvas in canvases]
    numbers = np.zeros((len(Number), len(plans)), dtype=np.int64)
    floats = numbers.view(np.float64)
    numbers[Number.CHOICE], floats[list(_BOUNDS)] = -1, np.inf
    choices: dict[Choice, int] = {}
    for i in group.members:
        spec, quota = specs[i], plans[i].quota
        if spec.guidance is None:
            rule, floats[Number.VALUE, i] = _rule(quota, spec.unmasking.policy)
            choice = spec.unmasking.policy.measures, rule
            numbers[Number.CHOICE, i] = choices.setdefault(choice, len(choices))
        if quota.first_needed and canvases[i].known[quota.candidates.start] < 0:
            numbers[Number.GUARANTEED, i] = 1
        elif quota.guaranteed is not None:
            numbers[Number.GUARANTEED, i] = (
                quota.guaranteed.stop - quota.candidates.start
            )
        if quota.parallel is not None:
            may_pass_none = PARALLEL_RULES[quota.parallel.kind].may_pass_none
            numbers[Number.LEAST, i] = (
                quota.least if may_pass_none else max(quota.least, 1)
            )
        numbers[Number.ENOUGH, i] = quota.enough if quota.enough > 2 else 0
        numbers[Number.DELAYS_EOS, i] = spec.ends.delay_eos
        floats[Number.ALG_TEMP, i] = spec.unmasking.alg_temp
        if quota.observed is not None:
            floats[Number.OBSERVED, i] = quota.observed
        if spec.unmasking.edit_threshold is not None:
            floats[Number.EDITED, i] = spec.unmasking.edit_threshold
            numbers[Number.BEGINS_DECIDED, i] = plans[i].post_step > 0
    uses = {number for number in _SWITCHED if numbers[number].any()}
    uses.update(number for number in _BOUNDS if (floats[number] < np.inf).any())
    if len(choices) > 1 or (numbers[Number.CHOICE, group.members] < 0).any():
        uses.add(Number.CHOICE)
    members = [specs[i] for i in group.members]
    measures = frozenset(spec.unmasking.policy.measures for spec in members)
    kept = [
        spec.reports.num_logprobs_kept
        for spec in members
        if spec.reports.num_logprobs_kept is not None
    ]
    settings = canvases[group.members[0]].settings
    work = FillWork(
        settings, tuple(choices), measures, max(kept, default=None), frozenset(uses)
    )
    if work.draws_positions or settings.temperature > 0:
        numbers[Number.SEED] = [canvas.seed for canvas in canvases]
        numbers[Number.FORWARD] = [plan.forward for plan in plans]
    return work, numbers


def fill(
    predictor: TokenPredictor,
    store: CanvasStore,
    end_tokens: torch.Tensor,
    work: FillWork,
    inputs: FillInputs,
    hidden: torch.Tensor,
    biased: Sequence[BiasedRows] = (),
    constrained: Sequence[ConstrainedRows] = (),
) -> tuple[Filled, TokenStatistics]:
    """Predict the candidates whose rows are ``hidden`` ``[num_candidates,
    hidden_size]``, and unmask the plans' quotas of those that are still masked."""
    requests, offsets, positions, places, _, flags = inputs.table.unbind()
    numbers, floats, uses = (
        inputs.numbers,
        inputs.numbers.view(torch.float64),
        work.uses,
    )
    counters = None
    if work.draws_positions or work.settings.temperature > 0:
        counters = Counters(
            numbers[Number.SEED][requests], numbers[Number.FORWARD][requests], positions
        )
    masked, stays = store.masked[places], store.tokens[places]
    options = None
    if constrained and Number.EDITED in uses:
        # A decided token stays or gives way, whatever lets the whole text match.
        free = predictor.predict(
            hidden, work.settings, counters, frozenset(), biased=biased
        )
        surer = free.probability > floats[Number.EDITED].float()[requests]
        options = torch.stack(
            (stays, torch.where(surer, free.token, stays)), dim=1
        ).masked_fill(masked[:, None], -1)
    statistics = predictor.predict(
        hidden,
        work.settings,
        counters,
        work.measures,
        num_logprobs=work.num_logprobs,
        biased=biased,
        constrained=constrained,
        options=options,
    )
    if work.draws_positions and counters is not None:
        no_token = torch.full_like(positions, NO_TOKEN)
        statistics.noise = uniform(*counters, no_token)
    barred = flags > 0
    if inputs.responses is not None:
        statistics.held_back = _held_back(store, end_tokens, inputs, statistics.token)
        barred = barred | statistics.held_back
    chosen = torch.zeros_like(barred)
    if Number.EDITED in uses:
        due = numbers[Number.BEGINS_DECIDED].index_add(0, requests, masked.long()) > 0
        chosen = ~masked & ~barred & due[requests] & (statistics.token != stays)
        if options is None:
            chosen &= statistics.probability > floats[Number.EDITED].float()[requests]
    # A step that runs ahead predicts some that are decided by now.
    statistics.written = (masked | chosen) & (flags & UNFINISHED == 0)
    barred = barred | ~masked
    guaranteed, least, enough = (
        numbers[number] if number in uses else None
        for number in (Number.GUARANTEED, Number.LEAST, Number.ENOUGH)
    )
    for number, (measure, rule) in enumerate(work.choices):
        confidence = statistics.confidence(measure, offsets)
        if inputs.certainty is not None:
            confidence = confidence * inputs.certainty
        if Number.ALG_TEMP in uses:
            # The largest of them are draws without replacement from the softmax of
            # confidences over temperatures.
            confidence = confidence + floats[Number.ALG_TEMP][requests] * gumbel_of(
                required(statistics.noise)
            )
        others = (
            barred | (numbers[Number.CHOICE][requests] != number)
            if Number.CHOICE in uses
            else barred
        )
        confidence = confidence.masked_fill(others, -torch.inf)
        values = floats[Number.VALUE].to(confidence.dtype)
        chosen |= select(
            rule,
            confidence,
            requests,
            offsets,
            values,
            inputs.width,
            guaranteed,
            least,
            enough,
        )
    store.fill(places, statistics.token, chosen)
    outcome = chosen * CHOSEN
    if Number.OBSERVED in uses:
        bounds = floats[Number.OBSERVED].float()[requests]
        outcome = (
            outcome + ((statistics.probability >= bounds) & (flags == 0)) * OBSERVED
        )
    # A NaN or an infinity among a row's logits makes every probability of the row NaN.
    outcome = outcome.long().masked_fill(statistics.probability.isnan(), NOT_FINITE)
    return torch.stack((requests, positions, statistics.token, outcome)), statistics


def _held_back(
    store: CanvasStore,
    end_tokens: torch.Tensor,
    inputs: FillInputs,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """Predicted end tokens after a masked position, while the response has none, where
    the request delays them; bool ``[num_candidates]``."""
    owners, places = required(inputs.responses)
    delays = inputs.numbers[Number.DELAYS_EOS]
    ends = torch.isin(store.tokens[places], end_tokens)
    delayed = (delays > 0) & (
        torch.zeros_like(delays).index_add_(0, owners, ends.long()) == 0
    )
    after_mask = store.masked[inputs.table[3] - 1]
    return torch.isin(tokens, end_tokens) & after_mask & delayed[inputs.table[0]]


def _rule(quota: UnmaskQuota, policy: UnmaskingPolicy) -> tuple[Rule, float]:
    """The rule by which a request's positions are chosen, and its value."""
    if quota.parallel is not None:
        return parallel_rule(quota.parallel.kind), quota.parallel.value
    if policy.draws_each_position:
        return drawn_below, quota.ratio
    return first_of_all, quota.count
