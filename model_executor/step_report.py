"""Reports of steps that have run, for the scheduler."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import LogprobsLists

from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.messages import (
    Commits,
    RequestFailure,
    ShownWindow,
    StepReport,
    StepResult,
)
from dllm_engine.decoding.step_plan import StepPlan, must_fill, revises
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.failures import failure_of
from dllm_engine.model_executor.passes.base import LayerPass, Results
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.unmasking.filling import StepOutcome
from dllm_engine.model_executor.unmasking.statistics import required


class StepsRun(NamedTuple):
    """Steps of one batch that have run one after the other."""

    plans: list[dict[str, StepPlan]]
    """One dictionary per step, by request."""
    outcomes: list[StepOutcome]
    """One per step."""
    results: list[Results]
    """Results of the layer pass, one per step."""
    arrays: list[np.ndarray]
    """Host copies of the tensors that the layer pass ``tensors_to_read`` for after the last step.
    """


@dataclass
class Reporter:
    """Reports of the steps of one batch."""

    batch: StepBatch
    """Rows of the first step."""
    layer_pass: LayerPass
    run: StepsRun
    mask_token_id: int
    with_trace: bool

    def reports(self) -> list[dict[str, StepResult]]:
        """Reports of each step by request, up to the last step that did something. The
        first failure of a request is its last report.
        """
        steps = self.run.plans
        reports: list[dict[str, StepResult]] = [{} for _ in steps]
        for index, (request_id, canvas) in enumerate(
            zip(self.batch.request_ids, self.batch.canvases, strict=True)
        ):
            rows = self.batch.host_positions[self.batch.rows(index)]
            for number, step in enumerate(steps):
                plan = step[request_id]
                try:
                    if number:
                        if (canvas.known[slice(*plan.window)] >= 0).all():
                            break  # the step ran for other requests, and did nothing here
                        # The step computed the rows of the first step. Rows that are
                        # not in its own plan had no effect.
                        rows = self.layer_pass.positions(plan, canvas)
                    result = self._result(index, number, plan, rows)
                except Exception as error:
                    result = failure_of(request_id, error)
                reports[number][request_id] = result
                if isinstance(result, RequestFailure):
                    break
        while len(reports) > 1 and not reports[-1]:
            reports.pop()
        return reports

    def _result(
        self, index: int, step: int, plan: StepPlan, rows: np.ndarray
    ) -> StepResult:
        """Apply a step to its canvas. ``rows``: canvas positions that the step
        computed.
        """
        outcome = self.run.outcomes[step]
        results = self.run.results[step]
        canvas = self.batch.canvases[index]
        layer_pass = self.layer_pass
        spec, changed, number = canvas.spec, outcome.positions[index], plan.forward + 1
        edited = canvas.write(changed, outcome.tokens[index])
        taken_back = canvas.take_back(outcome.taken_back.get(index, []))
        canvas.committed_at[changed] = number
        if index in outcome.not_finite:
            message = (
                f"the model produced logits that are NaN or infinite in forward pass "
                f"{number}"
            )
            return RequestFailure("not_finite", message)
        if not canvas.last_unmasked and must_fill(plan, spec):
            return RequestFailure(
                "no_progress",
                f"forward pass {number} unmasked no token, although it has to",
            )
        ends = spec.ends.early_stop and canvas.give_up_behind_end()
        kv_slots = layer_pass.take_read_tensors(index, results, self.run.arrays)
        masked = canvas.masked_per_block(plan.window)
        still_revises = revises(plan, spec, sum(masked), len(edited))
        sent = canvas.take_sendable(
            plan.window.start if still_revises else spec.layout.canvas_length
        )
        tokens = canvas.known[sent].tolist()
        return StepReport(
            plan=plan,
            rows_computed=layer_pass.rows_computed(index, rows.size, results),
            num_unmasked=len(canvas.last_unmasked) - len(taken_back),
            masked=masked,
            edited=[position for position, _, _ in edited],
            revises=still_revises,
            observation=canvas.slow_fast_observation(
                plan.window, outcome.farthest.get(index, -1)
            )
            if spec.unmasking.slow_fast
            else None,
            tokens=tokens or None,
            trace=_trace(canvas, plan, rows, edited, taken_back)
            | layer_pass.record(index, results)
            if self.with_trace
            else None,
            ends=ends,
            kv_slots=kv_slots,
            logprobs=_logprobs(canvas, sent)
            if tokens and spec.reports.num_logprobs is not None
            else None,
            commits=_commits(canvas, sent)
            if tokens and spec.reports.return_order
            else None,
            decision=canvas.decision.answers
            if canvas.decision is not None and not sum(masked)
            else None,
            shown=_shown(canvas, plan.window, self.mask_token_id)
            if spec.reports.streams_steps and not plan.quota.is_empty
            else None,
        )


def _trace(
    canvas: Canvas,
    plan: StepPlan,
    rows: np.ndarray,
    edited: list[tuple[int, int, int]],
    taken_back: list[tuple[int, int]],
) -> dict[str, Any]:
    """Trace entries of a step, by the names of ``DiffusionFigures.trace``."""
    spec = canvas.spec
    drafts = spec.layout.has_drafts
    may_edit = drafts or spec.unmasking.edit_threshold is not None
    may_take_back = drafts or plan.quota.left is not None
    whole = rows.size == spec.layout.canvas_length == spec.layout.response_span.stop
    return {
        "refresh_states": plan.state.value,
        "unmasked_per_step": canvas.last_unmasked,
        **({"edited_per_step": edited} if may_edit else {}),
        **({"remasked_per_step": taken_back} if may_take_back else {}),
        "windows": tuple(plan.window),
        "computed_positions": None if whole else rows.tolist(),
    }


def _logprobs(canvas: Canvas, sent: np.ndarray) -> LogprobsLists:
    """Log-probabilities of sent tokens in vLLM's form: the committed token first, then
    the likeliest tokens.
    """
    kept = canvas.logprobs
    assert kept is not None
    tokens = torch.cat((canvas.tokens[sent, None], kept.top_tokens[sent]), dim=-1)
    values = torch.cat((kept.token[sent, None], kept.top[sent]), dim=-1)
    return LogprobsLists(
        tokens.cpu().numpy(), values.cpu().numpy(), kept.rank[sent].cpu().numpy()
    )


def _commits(canvas: Canvas, sent: np.ndarray) -> Commits:
    assert canvas.logprobs is not None
    return Commits(
        canvas.committed_at[sent].tolist(), canvas.logprobs.token[sent].tolist()
    )


def _shown(canvas: Canvas, window: Span, mask_token_id: int) -> ShownWindow:
    start = canvas.layout.prompt_length
    positions = slice(window.start, min(window.stop, canvas.layout.response_span.stop))
    known = canvas.known[positions]
    confidences = required(canvas.confidences)[positions].tolist()
    return ShownWindow(
        start=window.start - start,
        sent=canvas.sent - start,
        token_ids=np.where(known < 0, mask_token_id, known).tolist(),
        masked=(known < 0).tolist(),
        confidences=[None if math.isnan(value) else value for value in confidences],
    )
