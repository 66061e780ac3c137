"""From the plans of a step to the rows of one forward pass."""

import itertools

import numpy as np
import torch

from dllm_engine.model_executor.canvas_store import CanvasStore
from dllm_engine.model_executor.step_batch import Canvas, StepBatch, ranges
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.scheduler.request import Span
from dllm_engine.scheduler.step_plan import RowRule, StepPlan

_BY_MASK = (RowRule.MASKED_BEFORE, RowRule.MASKED_BEFORE_AND_LAST)


def build_batch(plans: dict[str, StepPlan], store: CanvasStore) -> StepBatch:
    """The rows of all plans, request by request. Plans that name rows by a rule are resolved here."""
    spans = {request_id: _row_span(plan, store.canvases[request_id]) for request_id, plan in plans.items()}
    # Sequences of equal length side by side share one attention call.
    ordered = sorted(plans, key=lambda request_id: (spans[request_id].size, plans[request_id].read))
    in_order = [plans[request_id] for request_id in ordered]
    canvases = [store.canvases[request_id] for request_id in ordered]
    sizes = [spans[request_id].size for request_id in ordered]
    owners, positions = ranges([spans[request_id].start for request_id in ordered], sizes)
    starts = np.array([canvas.start for canvas in canvases])
    rows = on_device(np.stack((owners, positions, starts[owners] + positions)), store.tokens.device)
    by_mask = any(plan.rows in _BY_MASK for plan in in_order)
    if by_mask:
        rows = rows[:, _rows_selected_by_mask(in_order, canvases, store, rows[0], rows[1])]
        sizes = rows[0].bincount(minlength=len(ordered)).tolist()
    return StepBatch(
        request_ids=ordered,
        plans=in_order,
        canvases=canvases,
        cu_seqlens=list(itertools.accumulate(sizes, initial=0)),
        input_ids=store.tokens[rows[2]],
        positions=rows[1],
        spans=None if by_mask else [spans[request_id] for request_id in ordered],
    )


def page_table(page_ids: list[list[int]], device: torch.device) -> torch.Tensor:
    """Page ids of each layer as one table, ``[num_layers, most pages of a layer]`` int32."""
    widest = max(map(len, page_ids))
    # Page 0 is never handed out; what pads a layer is never read.
    padded = [pages + [0] * (widest - len(pages)) for pages in page_ids]
    return torch.tensor(padded, dtype=torch.int32, device=device)


def _row_span(plan: StepPlan, canvas: Canvas) -> Span:
    """The canvas positions that a plan's rows are chosen from; all of them, unless masks decide."""
    if plan.rows is RowRule.FROM_LAST_UNMASKED and canvas.last_unmasked:
        first = max(canvas.last_unmasked[0] - canvas.spec.shifts_logits, 0)
        return Span(min(plan.span.start, first), plan.span.stop)
    return plan.span


def _rows_selected_by_mask(
    plans: list[StepPlan], canvases: list[Canvas], store: CanvasStore, requests: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Which rows of the plans' spans are fed to the model, where masks decide; bool, one per row.

    ``requests`` and ``positions`` ``[num_rows]``: the batch number of each row's request, and its canvas position.
    """
    device = store.tokens.device
    was_masked = store.masked.clone()
    last = [canvas.start + position for canvas in canvases for position in canvas.last_unmasked]
    was_masked[torch.tensor(last, dtype=torch.int64, device=device)] = True

    def per_row(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=device)[requests]

    # The last row of a canvas predicts nothing with shifted logits: what follows in the store is another's.
    predicted = positions + int(canvases[0].spec.shifts_logits)
    stops = per_row([plan.span.stop for plan in plans])
    places = per_row([canvas.start for canvas in canvases]) + predicted.minimum(stops - 1)
    by_mask = was_masked[places] & (predicted < stops)
    and_last = per_row([plan.rows is RowRule.MASKED_BEFORE_AND_LAST for plan in plans]) & (positions == stops - 1)
    return by_mask | and_last | per_row([plan.rows not in _BY_MASK for plan in plans])
