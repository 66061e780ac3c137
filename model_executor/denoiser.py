"""The stages of a denoising step on a device: the forward pass, then the prediction and
unmasking of masked positions.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dllm_engine.decoding.messages import Failures
from dllm_engine.decoding.step_plan import StepPlan
from dllm_engine.model_executor.candidates import UNFINISHED, BatchCandidates
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.graphs.step import StepGraphs
from dllm_engine.model_executor.guide.model import Draft
from dllm_engine.model_executor.passes.base import (
    JoinedPass,
    LayerPass,
    Observe,
    PassInput,
    Results,
)
from dllm_engine.model_executor.rank import Rank
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.token_prediction import Demands
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.decisions import decide
from dllm_engine.model_executor.unmasking.filling import (
    CHOSEN,
    Filled,
    FillInputs,
    RequestNumbers,
    fill,
    fill_work,
)
from dllm_engine.model_executor.unmasking.logits import ConstrainedRows, class_on_device
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics, required


class Denoiser:
    """Stages of the steps on the canvases of a rank. It has no state of requests."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.graphs: StepGraphs | None = None

    def forward(
        self, batch: StepBatch, layer_pass: LayerPass
    ) -> tuple[Tensor, Results]:
        """Run a forward pass. Returns the hidden states of the batch's rows,
        ``[num_rows, hidden_size]``, which the next pass overwrites, and the results of
        the pass.
        """
        recorded = (
            None if self.graphs is None else self.graphs.forward(batch, layer_pass)
        )
        if recorded is not None:
            return recorded
        return self.rank.model(
            self.rank.store.tokens[batch.places], batch.positions, layer_pass
        )

    def forward_together(
        self, inputs: Sequence[PassInput]
    ) -> list[tuple[Tensor, Results]]:
        """Hidden states ``[num_rows, hidden_size]`` and results of each of several
        passes, by one forward pass.
        """
        if len(inputs) == 1:
            return [self.rank.model(*inputs[0])]
        tokens, positions, passes = zip(*inputs, strict=True)
        sizes = list(map(len, tokens))
        hidden, _ = self.rank.model(
            torch.cat(tokens), torch.cat(positions), JoinedPass(passes, sizes)
        )
        return [
            (rows, layer_pass.results())
            for rows, layer_pass in zip(hidden.split(sizes), passes, strict=True)
        ]

    def predict_and_unmask(
        self,
        hidden: Tensor,
        groups: list[BatchCandidates],
        plans: Sequence[StepPlan],
        observe: Observe | None,
    ) -> tuple[list[Filled], Failures]:
        """Predict a token for each candidate from the hidden states of all rows, and
        unmask as many as the plans (in batch order) ask for. Returns the filled
        candidates, and the failures of single requests.

        ``groups``: result of ``BatchCandidates.by_settings``. ``observe``: callback of
        the layer pass.
        """
        if self.graphs is not None and len(groups) > 1:
            # Graphs share their memory: the graph of a group may overwrite the hidden
            # states.
            hidden = hidden.clone()
        drafts: list[Draft] = []
        filled: list[Filled] = []
        failures: Failures = {}
        for group in groups:
            if not group.positions.numel():
                continue
            if group.decides:
                decided, failed = decide(self.rank.predictor, hidden[group.rows], group)
                filled.append(decided)
                failures |= failed
                continue
            group_filled, statistics = self._fill(hidden, group, plans)
            filled.append(group_filled)
            drafts += _observe(group, statistics, observe)
        guided, failed = self._fill_guided(plans, drafts)
        return filled + guided, failures | failed

    def _fill(
        self, hidden: Tensor, group: BatchCandidates, plans: Sequence[StepPlan]
    ) -> tuple[Filled, TokenStatistics]:
        """Predict candidates of equal settings in one pass through the head, and unmask
        as many as the plans' quotas ask for.
        """
        rank = self.rank
        work, numbers = fill_work(group, plans)
        constrained = _constrained_rows(group)
        if self.graphs is not None and not constrained:
            recorded = self.graphs.fill(hidden, group, work, numbers)
            if recorded is not None:
                return recorded
        inputs = FillInputs(
            group.table,
            RequestNumbers(on_device(numbers.table, rank.device)),
            group.certainty,
            group.responses,
            group.width,
        )
        demands = Demands(group.biased, constrained)
        return fill(rank, work, inputs, hidden[group.rows], demands)

    def _fill_guided(
        self, plans: Sequence[StepPlan], drafts: list[Draft]
    ) -> tuple[list[Filled], Failures]:
        """Unmask the tokens of each request's draft that the guide accepts."""
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


def _observe(
    group: BatchCandidates, statistics: TokenStatistics, observe: Observe | None
) -> list[Draft]:
    """Show predictions to the layer pass, and keep the statistics that requests report.
    Returns the drafts of requests that have a guide.
    """
    batch = group.batch
    drafts = []
    asks = any(batch.canvases[i].spec.needs_per_step_output for i in group.members)
    if observe is None and not asks:
        return []
    for index, positions, request_statistics in group.split(statistics):
        canvas = batch.canvases[index]
        if observe is not None:
            observe(index, positions, request_statistics)
        _record(canvas, positions, request_statistics)
        if (guidance := canvas.spec.guidance) is not None:
            drafted = slice(guidance.speculation_length)
            draft = Draft(
                index,
                batch.request_ids[index],
                canvas,
                positions[drafted].tolist(),
                request_statistics.token[drafted].tolist(),
                request_statistics.probability[drafted].tolist(),
            )
            drafts.append(draft)
    return drafts


def select_guided(draft: Draft, *, first_needed: bool) -> dict[int, int]:
    """The tokens that a guided step unmasks (arXiv 2505.21467, section 3.2.2), by their
    index in a checked draft; at least one token. ``first_needed``: the first position
    must be among them."""
    spec, drafted, ranks = draft.canvas.spec, draft.tokens, draft.ranks
    guidance = spec.guidance
    assert guidance is not None
    # The guide's token is not used if it is an end token before a given token (a draft
    # never is), or with a constraint, which it may violate.
    guided = [
        drafted_token
        if spec.text.is_constrained
        or (token in spec.ends.tokens and position < spec.layout.last_given)
        else token
        for token, drafted_token, position in zip(
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
    # First select, then correct: the guide's tokens after the uncorrected drafts are
    # final.
    return {i: guided[i] for i in chosen} if guidance.correction else chosen


def _constrained_rows(group: BatchCandidates) -> list[ConstrainedRows]:
    """The rows of each request of a constrained group; empty for other groups."""
    canvases = group.batch.canvases
    if canvases[group.members[0]].constrained is None:
        return []
    # A row that has left the pass predicts nothing: its position counts as behind all
    # blocks, which is ignored. This waits for the device, because only the device may
    # know these rows.
    unfinished = group.flags & UNFINISHED > 0
    nowhere = torch.iinfo(torch.int64).max
    positions = group.positions.masked_fill(unfinished, nowhere).cpu().numpy()
    constrained = []
    for index in group.members:
        canvas = canvases[index]
        rows = group.rows_of(index)
        assert canvas.constrained is not None
        stop = min(
            group.batch.plans[index].window.stop, canvas.layout.response_span.stop
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


def _record(canvas: Canvas, positions: Tensor, statistics: TokenStatistics) -> None:
    """Keep the statistics of its predictions that a request reports. A decided position
    keeps the statistics of the step that wrote its token."""
    written = required(statistics.written)

    def keep(kept: Tensor, new: Tensor) -> None:
        kept[positions] = torch.where(
            written.view(-1, *[1] * (new.dim() - 1)), new, kept[positions]
        )

    if canvas.confidences is not None:
        keep(canvas.confidences, statistics.probability)
    kept = canvas.logprobs
    new = statistics.logprobs
    if kept is None or new is None:
        return
    num_logprobs = kept.top.shape[1]
    keep(kept.token, new.token)
    keep(kept.rank, new.rank)
    keep(kept.top_tokens, new.top_tokens[:, :num_logprobs])
    keep(kept.top, new.top[:, :num_logprobs])
