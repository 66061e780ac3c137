"""Denoising steps of one batch: forward pass, predictions of the masked positions, and
what is filled of them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from dllm_engine.decoding.messages import Failures
from dllm_engine.decoding.step_plan import StepPlan
from dllm_engine.model_executor.candidates import BatchCandidates
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.graphs.step import StepGraphs
from dllm_engine.model_executor.guide.model import Draft
from dllm_engine.model_executor.passes.base import LayerPass, Results
from dllm_engine.model_executor.rank import Rank
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.token_prediction import SamplingSettings
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.decisions import decide
from dllm_engine.model_executor.unmasking.filling import (
    CHOSEN,
    Filled,
    FillInputs,
    StepOutcome,
    fill,
    fill_work,
    outcomes_of,
)
from dllm_engine.model_executor.unmasking.logits import ConstrainedRows, class_on_device
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics, required


class StepsRun(NamedTuple):
    """What steps of one batch, run one after the other, have left."""

    outcomes: list[StepOutcome]
    """Of each step."""
    failures: Failures
    """Of requests whose own part of a step failed."""
    results: list[Results]
    """Of the layer pass, in each step."""
    answers: list[np.ndarray]
    """Values on the host of what the layer pass ``asked`` after the last step."""


class Denoiser:
    """Runs steps on the canvases of a rank. Knows no request but those of the batch it
    is given.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.graphs: StepGraphs | None = None

    def run(
        self,
        candidates: BatchCandidates,
        layer_pass: LayerPass,
        steps: Iterable[dict[str, StepPlan]],
    ) -> StepsRun:
        """Run steps of one batch, which do the same work on other tokens. Between them
        the device is not waited for.

        An exception in here is no one request's and ends the engine: pages have been
        written in part, by some layers and perhaps by some ranks, so that running the
        requests again, one by one, would not compute the same.
        """
        batch, groups = candidates.batch, self._by_settings(candidates)
        filled_by_step: list[list[Filled]] = []
        results: list[Results] = []
        failures: Failures = {}
        for plans in steps:
            if filled_by_step:
                layer_pass.follow(self.rank.store.masked)
            step_plans = [plans[request_id] for request_id in batch.request_ids]
            filled, step_failures, left = self._step(
                batch, step_plans, groups, layer_pass
            )
            filled_by_step.append(filled)
            results.append(left)
            failures |= step_failures
        outcomes, answers = outcomes_of(
            filled_by_step, len(batch.plans), layer_pass.asked(results[-1])
        )
        return StepsRun(outcomes, failures, results, answers)

    def forward(
        self, batch: StepBatch, layer_pass: LayerPass
    ) -> tuple[torch.Tensor, Results]:
        """Hidden states of a batch's rows, ``[num_rows, hidden_size]``, to be read
        before the next pass, and the results of the pass.
        """
        recorded = (
            None if self.graphs is None else self.graphs.forward(batch, layer_pass)
        )
        if recorded is not None:
            return recorded
        return self.rank.model(
            self.rank.store.tokens[batch.places], batch.positions, layer_pass
        )

    def _by_settings(self, candidates: BatchCandidates) -> list[BatchCandidates]:
        """Groups of candidates that go through the head together."""
        members: dict[tuple[SamplingSettings, bool, bool], list[int]] = defaultdict(
            list
        )
        for index in candidates.members:
            canvas = candidates.batch.canvases[index]
            members[
                canvas.settings,
                canvas.constrained is not None,
                canvas.decision is not None,
            ].append(index)
        return [candidates.of_requests(indices) for indices in members.values()]

    def _step(
        self,
        batch: StepBatch,
        plans: Sequence[StepPlan],
        groups: list[BatchCandidates],
        layer_pass: LayerPass,
    ) -> tuple[list[Filled], Failures, Results]:
        """One forward pass of ``batch`` by ``plans``, in its order. Returns what it
        fills in, the failures, and the results of the layer pass.
        """
        hidden, results = self.forward(batch, layer_pass)
        if self.graphs is not None and len(groups) > 1:
            # Graphs share their memory: the one that fills a group in may write over
            # it.
            hidden = hidden.clone()
        if (finished := layer_pass.finished(results)) is not None:
            groups = [group.of_finished(*finished) for group in groups]
        drafts: list[Draft] = []
        filled: list[Filled] = []
        failures: Failures = {}
        observe = layer_pass.observe
        for group in groups:
            if not group.positions.numel():
                continue
            if batch.canvases[group.members[0]].decision is not None:
                decided, failed = decide(self.rank.predictor, hidden[group.rows], group)
                filled.append(decided)
                failures |= failed
                continue
            outcome, statistics = self._fill(hidden, group, plans)
            filled.append(outcome)
            if observe is not None or any(
                batch.canvases[i].spec.needs_per_step_output for i in group.members
            ):
                for index, positions, request_statistics in group.split(statistics):
                    canvas = batch.canvases[index]
                    if observe is not None:
                        observe(index, positions, request_statistics)
                    _record(canvas, positions, request_statistics)
                    if (guidance := canvas.spec.guidance) is not None:
                        columns = (
                            positions,
                            request_statistics.token,
                            request_statistics.probability,
                        )
                        drafted, tokens, probabilities = (
                            x[: guidance.speculation_length].tolist() for x in columns
                        )
                        request_id = batch.request_ids[index]
                        drafts.append(
                            Draft(
                                index,
                                request_id,
                                canvas,
                                drafted,
                                tokens,
                                probabilities,
                            )
                        )
        guided, failed = self._fill_guided(plans, drafts)
        return filled + guided, failures | failed, results

    def _fill(
        self, hidden: torch.Tensor, group: BatchCandidates, plans: Sequence[StepPlan]
    ) -> tuple[Filled, TokenStatistics]:
        """Predict candidates of equal settings in one pass through the head, and unmask
        the plans' quotas of them.
        """
        rank = self.rank
        work, numbers = fill_work(group, plans)
        constrained = _constrained_rows(group)
        if self.graphs is not None and not constrained:
            recorded = self.graphs.fill(hidden, group, work, numbers)
            if recorded is not None:
                return recorded
        numbers_here, own = on_device(numbers, rank.device), hidden[group.rows]
        inputs = FillInputs(
            group.table, numbers_here, group.certainty, group.responses, group.width
        )
        return fill(
            rank.predictor,
            rank.store,
            rank.end_tokens,
            work,
            inputs,
            own,
            group.biased,
            constrained,
        )

    def _fill_guided(
        self, plans: Sequence[StepPlan], drafts: list[Draft]
    ) -> tuple[list[Filled], Failures]:
        """Unmask what the guide lets pass of each request's draft."""
        if not drafts:
            return [], {}
        assert self.rank.guide is not None
        failures = self.rank.guide.check(drafts)
        filled = []
        for draft in drafts:
            if draft.request_id in failures:
                continue
            chosen = select_guided(
                draft, first_needed=plans[draft.index].quota.first_needed
            )
            rows = [
                [draft.index, draft.positions[i], token, CHOSEN]
                for i, token in sorted(chosen.items())
            ]
            filled.append(on_device(rows, self.rank.device).T)
            _, positions, tokens, _ = filled[-1]
            draft.canvas.tokens[positions] = tokens
            draft.canvas.masked[positions] = False
        return filled, failures


def select_guided(draft: Draft, *, first_needed: bool) -> dict[int, int]:
    """The tokens that a guided step unmasks (arXiv 2505.21467, section 3.2.2), by their
    index in a checked draft; at least one. ``first_needed``: the first position must be
    filled now, whatever else is."""
    spec, drafted, ranks = draft.canvas.spec, draft.tokens, draft.ranks
    guidance = spec.guidance
    assert guidance is not None
    # Where something given follows, no end token; the model's draft is none. Nor what
    # leaves a constraint.
    guided = [
        own
        if spec.text.is_constrained
        or (token in spec.ends.tokens and position < spec.layout.last_given)
        else token
        for token, own, position in zip(
            draft.guided, drafted, draft.positions, strict=True
        )
    ]
    prefix = next(
        (count for count, rank in enumerate(ranks) if rank >= guidance.top_k),
        len(ranks),
    )
    chosen = {i: drafted[i] for i in range(prefix)}
    if guidance.threshold is not None:
        chosen |= {
            i: drafted[i]
            for i, p in enumerate(draft.probabilities)
            if p > guidance.threshold
        }
    if not chosen or (first_needed and 0 not in chosen):
        chosen[0] = guided[0] if guidance.fallback == "guide" else drafted[0]
    # Selected first, corrected after: what the guide would have said after the
    # uncorrected drafts is final.
    return {i: guided[i] for i in chosen} if guidance.correction else chosen


def _constrained_rows(group: BatchCandidates) -> list[ConstrainedRows]:
    """The rows of each request, in a group of constrained ones; none
    in another group.
    """
    canvases = group.batch.canvases
    if canvases[group.members[0]].constrained is None:
        return []
    positions = (
        group.positions.cpu().numpy()
    )  # waits: which rows predict, the device alone may know
    constrained = []
    for index in group.members:
        canvas, rows = canvases[index], slice(*group.bounds[index : index + 2].tolist())
        assert canvas.constrained is not None
        stop = min(
            group.batch.plans[index].window.stop, canvas.spec.layout.response_span.stop
        )
        constraint = canvas.constrained.constraint
        choose = partial(
            canvas.constrained.classes, canvas.known, stop, positions[rows]
        )
        class_of = class_on_device(constraint, group.rows.device)
        constrained.append(
            ConstrainedRows(rows, class_of, constraint.num_classes, choose)
        )
    return constrained


def _record(
    canvas: Canvas, positions: torch.Tensor, statistics: TokenStatistics
) -> None:
    """Keep what a request asks to know of its predictions. What is kept of a decided
    position is that of the step that wrote its token."""
    written = required(statistics.written)

    def keep(kept: torch.Tensor, made: torch.Tensor) -> None:
        kept[positions] = torch.where(
            written.view(-1, *[1] * (made.dim() - 1)), made, kept[positions]
        )

    if canvas.confidences is not None:
        keep(canvas.confidences, statistics.probability)
    kept, made = canvas.logprobs, statistics.logprobs
    if kept is None or made is None:
        return
    wanted = kept.top.shape[1]
    keep(kept.token, made.token)
    keep(kept.rank, made.rank)
    keep(kept.top_tokens, made.top_tokens[:, :wanted])
    keep(kept.top, made.top[:, :wanted])
