"""Reports of steps that have run, for the scheduler."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsLists

from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.passes.base import LayerPass
from dllm_engine.model_executor.step_batch import StepBatch, row_positions
from dllm_engine.model_executor.unmasking.filling import StepOutcome
from dllm_engine.scheduler.messages import Commits, RequestFailure, ShownWindow, StepReport, StepResult, failure_of
from dllm_engine.scheduler.request import Span
from dllm_engine.scheduler.step_plan import StepPlan, must_fill, revises


def step_reports(
    batch: StepBatch,
    steps: Sequence[dict[str, StepPlan]],
    outcomes: Sequence[StepOutcome],
    layer_pass: LayerPass,
    mask_token_id: int,
    *,
    with_trace: bool,
) -> list[dict[str, StepResult]]:
    """A dictionary per step, by request, up to the last step that did something. A request ends with its first
    failure.

    Args:
        batch: of the first step.
        steps: the plans of each step.
        outcomes: what each step filled.
        layer_pass: which ran them.
    """
    reports: list[dict[str, StepResult]] = [{} for _ in outcomes]
    for index, request_id in enumerate(batch.request_ids):
        plans = [step[request_id] for step in steps]
        try:
            results = _results(batch, index, plans, outcomes, layer_pass, mask_token_id, with_trace)
        except Exception as error:
            results = [failure_of(request_id, error)]
        for step_results, result in zip(reports, results, strict=False):
            step_results[request_id] = result
    return reports[: 1 + max((i for i, step_results in enumerate(reports) if step_results), default=0)]


def _results(
    batch: StepBatch,
    index: int,
    plans: list[StepPlan],
    outcomes: Sequence[StepOutcome],
    layer_pass: LayerPass,
    mask_token_id: int,
    with_trace: bool,
) -> list[StepResult]:
    """Results of the steps for one request, up to the first that fails."""
    canvas = batch.canvases[index]
    results: list[StepResult] = []
    for plan, outcome in zip(plans, outcomes, strict=True):
        if results and (canvas.known[slice(*plan.window)] >= 0).all():
            break  # it ran with others, and had nothing to do
        # A step that ran ahead was fed the rows of the first one; those that its own plan leaves out had no effect.
        rows = row_positions(plan, canvas) if results else batch.host_positions[batch.rows(index)]
        changed = outcome.positions[index]
        edited = canvas.write(changed, outcome.tokens[index])
        unmasked = canvas.last_unmasked
        if canvas.committed_at is not None:
            canvas.committed_at[changed] = plan.forward + 1
        if failure := _failure(plan, canvas, index, outcome):
            return [*results, failure]
        ends = canvas.spec.early_stop and canvas.give_up_behind_end()
        canvas.next_rows = layer_pass.next_rows(index)
        masked = canvas.masked_per_block(plan.window)
        still_revises = revises(plan, canvas.spec, sum(masked), len(edited))
        sent = canvas.take_sendable(plan.window.start if still_revises else canvas.spec.canvas_length)
        tokens = canvas.known[sent].tolist()
        shows_step = canvas.confidences is not None and not plan.prefills
        report = StepReport(
            plan=plan,
            rows_computed=layer_pass.rows_computed(index, rows.size),
            num_unmasked=len(unmasked),
            masked=masked,
            num_edited=len(edited),
            revises=still_revises,
            seen=canvas.seen(plan.window, outcome.farthest.get(index, -1)) if canvas.spec.slow_fast else None,
            tokens=tokens or None,
            trace=_trace(batch, index, plan, rows, edited, layer_pass) if with_trace else None,
            ends=ends,
            kv_slots=layer_pass.kv_slots(index),
            logprobs=_logprobs(canvas, sent) if tokens and canvas.spec.num_logprobs is not None else None,
            commits=_commits(canvas, sent) if tokens and canvas.committed_at is not None else None,
            decision=canvas.decision.answers if canvas.decision is not None and not sum(masked) else None,
            shown=_shown(canvas, plan.window, mask_token_id) if shows_step else None,
        )
        results.append(report)
    return results


def _failure(plan: StepPlan, canvas: Canvas, index: int, outcome: StepOutcome) -> RequestFailure | None:
    """Failure of a request's part of a step; None: no failure."""
    if index in outcome.not_finite:
        return RequestFailure(
            "not_finite", f"the model produced logits that are NaN or infinite in forward pass {plan.forward + 1}"
        )
    if not canvas.last_unmasked and must_fill(plan, canvas.spec):
        return RequestFailure("no_progress", f"forward pass {plan.forward + 1} unmasked no token, although it has to")
    return None


def _trace(
    batch: StepBatch,
    index: int,
    plan: StepPlan,
    rows: np.ndarray,
    edited: list[tuple[int, int, int]],
    layer_pass: LayerPass,
) -> dict[str, Any]:
    """Trace entries of a step, by the names of ``DiffusionFigures.trace``. ``rows``: canvas positions computed."""
    canvas = batch.canvases[index]
    spec = canvas.spec
    whole = rows.size == spec.canvas_length == spec.response_span.stop
    return {
        "refresh_states": plan.state.value,
        "unmasked_per_step": canvas.last_unmasked,
        **({} if spec.edit_threshold is None else {"edited_per_step": edited}),
        "windows": tuple(plan.window),
        "computed_positions": None if whole else rows.tolist(),
    } | layer_pass.record(index)


def _logprobs(canvas: Canvas, sent: np.ndarray) -> LogprobsLists:
    """Log-probabilities of sent tokens in vLLM's form: the committed token first, then the likeliest tokens."""
    kept = canvas.logprobs
    assert kept is not None
    tokens = torch.cat((canvas.tokens[sent, None], kept.top_tokens[sent]), dim=-1)
    values = torch.cat((kept.token[sent, None], kept.top[sent]), dim=-1)
    return LogprobsLists(tokens.cpu().numpy(), values.cpu().numpy(), kept.rank[sent].cpu().numpy())


def _commits(canvas: Canvas, sent: np.ndarray) -> Commits:
    assert canvas.committed_at is not None
    assert canvas.logprobs is not None
    return Commits(canvas.committed_at[sent].tolist(), canvas.logprobs.token[sent].tolist())


def _shown(canvas: Canvas, window: Span, mask_token_id: int) -> ShownWindow:
    assert canvas.confidences is not None
    start = canvas.spec.prompt_length
    here = slice(window.start, min(window.stop, canvas.spec.response_span.stop))
    known = canvas.known[here]
    return ShownWindow(
        start=window.start - start,
        sent=canvas.sent - start,
        token_ids=np.where(known < 0, mask_token_id, known).tolist(),
        masked=(known < 0).tolist(),
        confidences=[None if math.isnan(value) else value for value in canvas.confidences[here].tolist()],
    )
