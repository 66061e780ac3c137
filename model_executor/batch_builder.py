"""From the plans of a step to the rows of one forward pass."""

import itertools

import numpy as np
import torch

from dllm_engine.model_executor.canvas_store import CanvasStore
from dllm_engine.model_executor.step_batch import Canvas, StepBatch
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.scheduler.step_plan import RowRule, Scope, StepPlan

_BY_MASK = (RowRule.MASKED_BEFORE, RowRule.MASKED_BEFORE_AND_LAST)


def build_batch(plans: dict[str, StepPlan], store: CanvasStore) -> StepBatch:
    """The rows of all plans, request by request. Plans that name rows by a rule are resolved here."""
    rows = {request_id: _row_positions(plan, store.canvases[request_id]) for request_id, plan in plans.items()}
    # Sequences of equal length side by side share one attention call. Those that need no pages come last.
    ordered = sorted(plans, key=lambda i: (plans[i].scope is Scope.ALL, rows[i].size, plans[i].read))
    canvases = [store.canvases[request_id] for request_id in ordered]
    sizes = [rows[request_id].size for request_id in ordered]
    positions = np.concatenate([rows[request_id] for request_id in ordered])
    places = positions + np.repeat([canvas.start for canvas in canvases], sizes)
    row_numbers = on_device(np.stack((positions, places)), store.tokens.device)
    return StepBatch(
        request_ids=ordered,
        plans=[plans[request_id] for request_id in ordered],
        canvases=canvases,
        cu_seqlens=list(itertools.accumulate(sizes, initial=0)),
        positions=row_numbers[0],
        host_positions=positions,
        places=row_numbers[1],
    )


def page_table(page_ids: list[list[int]], device: torch.device) -> torch.Tensor:
    """Page ids of each layer as one table, ``[num_layers, most pages of a layer]`` int32."""
    widest = max(map(len, page_ids))
    # Page 0 is never handed out; what pads a layer is never read.
    padded = [pages + [0] * (widest - len(pages)) for pages in page_ids]
    return on_device(padded, device, torch.int32)


def _row_positions(plan: StepPlan, canvas: Canvas) -> np.ndarray:
    """The canvas positions of a plan's rows, ascending."""
    if plan.rows is RowRule.CHOSEN:
        assert canvas.next_rows is not None
        return canvas.next_rows
    span, shift = plan.span, int(canvas.spec.shifts_logits)
    if plan.rows is RowRule.FROM_LAST_UNMASKED and canvas.last_unmasked:
        return np.arange(min(span.start, max(canvas.last_unmasked[0] - shift, 0)), span.stop)
    positions = np.arange(*span)
    if plan.rows not in _BY_MASK:
        return positions
    was_masked = canvas.known < 0
    was_masked[canvas.last_unmasked] = True
    # The last row of a canvas predicts nothing with shifted logits.
    chosen = np.append(was_masked[span.start + shift : span.stop], np.zeros(shift, dtype=bool))
    chosen[-1] |= plan.rows is RowRule.MASKED_BEFORE_AND_LAST
    return positions[chosen]
