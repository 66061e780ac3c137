"""Layer pass of FOCUS (arXiv 2601.23278): it drops, in the second layer, the masked
rows of the running block that it does not expect to decode.

Keys and values of the whole canvas are kept by position. Every row that a layer
computes overwrites its K/V, and attends to everything up to the rightmost row of the
pass, including positions that the pass does not compute, with the K/V of the last pass
that did.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce

from dllm_engine.cache_methods.focus.eviction import MaskedRows, OwnMasks
from dllm_engine.cache_methods.focus.method import FocusOptions, FocusStep
from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.step_plan import StepPlan
from dllm_engine.kernels.paged_attention import paged_attention
from dllm_engine.model_executor.batch_tables import ALL_LAYERS, TokenTables
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.graphs.recording import HOST_BOUND_ROWS, padded
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import GraphParts, LayerPass, Results
from dllm_engine.model_executor.step_batch import RowBounds, StepBatch
from dllm_engine.model_executor.transfer import on_device

EVICTING_LAYER = 1
"""The importance of a row is compared between the layer before this one and this one,
which drops rows.
"""


@dataclass(frozen=True)
class BlockState:
    """State of a request's block between passes."""

    keep: int
    """The fewest masked rows that a pass keeps, ``k`` in the paper."""
    num_passes: int = 0
    num_filled: int = 0
    processed: int = 0
    """Position before which all positions of the block went through all layers."""

    def next_block(self, start: int, options: FocusOptions) -> "BlockState":
        """The state at the start of a block at ``start``."""
        keep = self.keep
        if options.first_keep == "alpha" and options.alpha > 0:
            keep = math.ceil(options.alpha)
        return BlockState(keep, processed=start)

    def after(
        self, num_filled: int, processed: int, options: FocusOptions
    ) -> "BlockState":
        """The state after a pass that filled ``num_filled`` tokens, and whose rows
        before ``processed`` went through all layers.
        """
        num_passes = self.num_passes + 1
        filled = self.num_filled + num_filled
        keep = self.keep
        if options.alpha > 0:
            keep = max(math.ceil(options.alpha * filled / num_passes), 1)
        return BlockState(keep, num_passes, filled, max(self.processed, processed))


class FocusPass(LayerPass):
    """Pass that all requests share. Requests that feed prompts or a decision, or have
    few masked rows left, keep all rows.

    If launched, the pass goes on with the rows that stay; the host waits for their
    number. If recorded, it goes on with all rows, but dropped rows are not written, and
    no row attends to them.
    """

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        self.batch = batch
        self.pages = pages
        self.options = FocusOptions.of(batch.canvases[0].spec)
        self.states = [
            self._state(plan, canvas)
            for plan, canvas in zip(batch.plans, batch.canvases, strict=True)
        ]
        """The state of each request before the pass; None: the request keeps all rows.
        """
        masks = [self._masks(index) for index in range(len(batch.plans))]
        width = max(canvas.spec.layout.attended_length for canvas in batch.canvases)
        self.masked = None
        """Masked rows; None if no request drops rows."""
        if any(request_masks is not None for request_masks in masks):
            self.masked = MaskedRows(masks, width, batch.device)
        last_rows = np.array(batch.bounds[1:]) - 1
        ends = (batch.host_positions[last_rows] + 1).tolist()
        self.tables = TokenTables(batch, pages, head_len=ends)
        self.ends = on_device(ends, batch.device, torch.int32)
        """Number of tokens that the rows of each request attend to before rows are
        dropped.
        """
        num_rows = batch.bounds[-1]
        self.graph_rows = 0
        self.most_rows = batch.max_seqlen
        if num_rows <= HOST_BOUND_ROWS and batch.limits is None and batch.only_reuses:
            self.graph_rows = padded(num_rows) or num_rows
            self.most_rows = width
        more = max(self.graph_rows - num_rows, 0)
        places = self.tables.slots(
            ALL_LAYERS, batch.requests, batch.positions, pages.page_size
        )
        self.places = F.pad(places, (0, more), value=-1)
        """Place of each row in pages, ``[num_layers, num_rows]``; −1 behind the rows of
        the batch.
        """
        self.requests = F.pad(batch.requests, (0, more))
        self.num_finished = batch.sizes
        """Upper bound of the rows of each request that go through all layers."""
        self.finished_positions: dict[int, np.ndarray] = {}
        """Canvas positions of the rows that went through all layers, by request."""

    def _state(self, plan: StepPlan, canvas: Canvas) -> BlockState | None:
        step: FocusStep | None = plan.own
        if step is None:
            return None
        state: BlockState = canvas.own or BlockState(self.options.keep)
        if step.begins_block:
            state = state.next_block(_block(plan, canvas).start, self.options)
        return state

    def _masks(self, index: int) -> OwnMasks | None:
        state = self.states[index]
        canvas = self.batch.canvases[index]
        if state is None or self.options.select == "none":
            return None
        block = _block(self.batch.plans[index], canvas)
        masked = block.start + np.flatnonzero(canvas.known[slice(*block)] < 0)
        if masked.size <= state.keep:
            return None
        request_positions = self.batch.host_positions[self.batch.rows(index)]
        rows = self.batch.bounds[index] + np.searchsorted(request_positions, masked)
        return OwnMasks(masked, rows, state.keep, state.processed)

    @staticmethod
    def positions(plan: StepPlan, canvas: Canvas) -> np.ndarray:
        """All rows in the first pass of a block. Later, positions that were masked
        before the last pass, and positions whose right neighbour was.
        """
        rows = np.arange(*plan.span)
        step: FocusStep | None = plan.own
        if step is None or step.begins_block:
            return rows
        was_known = canvas.known[slice(*plan.span)] >= 0
        was_known[np.array(canvas.last_unmasked, dtype=np.int64) - plan.span.start] = (
            False
        )
        neighbour_was_known = np.append(was_known[1:], True)
        return rows[~(was_known & neighbour_was_known)]

    def graph_parts(self) -> GraphParts | None:
        if not self.graph_rows:
            return None
        inputs = [
            self.places,
            self.requests,
            self.tables.tables,
            self.ends,
            self.batch.cu_seqlens,
        ]
        if self.masked is not None:
            inputs += self.masked.graph_inputs()
        return GraphParts(self.masked is not None, inputs, self.graph_rows)

    def finished(self, results: Results) -> tuple[Tensor, Sequence[int]] | None:
        return (results[0], self.num_finished) if results else None

    def __call__(
        self, layers: Iterable[DecoderLayer], hidden: Tensor, phases: RotaryPhases
    ) -> tuple[Tensor, Results]:
        """Result, if rows are dropped: True for each row that went through all layers,
        bool ``[num_rows]``."""
        num_rows, positions, masked = len(hidden), phases.positions, self.masked
        bounds: RowBounds = self.batch
        self.tables.set_lengths(self.ends)
        slots = self.pages.slots(self.places[:, :num_rows])
        rows = torch.arange(num_rows, device=hidden.device)
        x, importance, results = hidden, hidden.new_zeros(()), []
        for index, layer in enumerate(layers):
            q, k, v = layer.qkv(layer.attn_norm(x), phases)
            self.pages.write(k, v, slots[index], rows)
            if masked is not None and index <= EVICTING_LAYER:
                before = importance
                importance = masked.importance(q, k)
            if masked is not None and index == EVICTING_LAYER:
                # Ranks score with different heads, but must keep the same rows.
                rises = tensor_model_parallel_all_reduce(importance - before)
                stay = masked.stay(rises, num_rows, self.options)
                results = [stay]
                if self.recorded:
                    slots = slots.masked_fill(~stay[:, None], -1)
                else:
                    rows, bounds = self._compact(stay)
                    x = x[rows]
                    phases = phases[rows]
                    q, k, v = q[rows], k[rows], v[rows]
            attended = paged_attention(
                q,
                k,
                v,
                bounds.cu_seqlens,
                self.tables.paged_tokens(index),
                attend_fresh=False,
                max_seqlen=self.most_rows,
                limits=bounds.limits,
            )
            x += layer.mlp(layer.mlp_norm(x, layer.o_proj(attended)))
            if results and index == EVICTING_LAYER:
                self._end_at_last(results[0], positions)
        if x is not hidden:
            hidden[rows] = x
        return hidden, results

    def _compact(self, stay: Tensor) -> tuple[Tensor, RowBounds]:
        """The rows that go on, and their bounds. The host waits for ``stay``."""
        rows = np.flatnonzero(stay.cpu().numpy())
        sizes = np.diff(np.searchsorted(rows, self.batch.bounds)).tolist()
        self.num_finished = sizes
        staying = on_device(rows, stay.device)
        limits = self.batch.limits
        limits = None if limits is None else limits[staying]
        return staying, RowBounds(sizes, stay.device, limits)

    def _end_at_last(self, stay: Tensor, positions: Tensor) -> None:
        """End the tokens that each request attends to at its last row that goes on."""
        ends = torch.zeros_like(self.ends)
        row_ends = torch.where(stay, positions + 1, 0).to(ends.dtype)
        requests = self.requests[: len(stay)]
        self.tables.set_lengths(ends.scatter_reduce_(0, requests, row_ends, "amax"))

    def tensors_to_read(self, results: Results) -> list[Tensor]:
        return [*results]

    def take_read_tensors(
        self, index: int, results: Results, arrays: Sequence[np.ndarray]
    ) -> int | None:
        rows = self.batch.rows(index)
        state = self.states[index]
        finished = self.batch.host_positions[rows]
        if results:
            finished = finished[arrays[0][rows]]
        self.finished_positions[index] = finished
        canvas = self.batch.canvases[index]
        if state is not None:
            num_filled = len(canvas.last_unmasked)
            processed = int(finished[-1]) + 1
            canvas.own = state.after(num_filled, processed, self.options)
        return None

    def rows_computed(self, index: int, num_rows: int, results: Results) -> int:
        num_layers = self.pages.geometry.num_layers
        num_left_out = num_rows - self.finished_positions[index].size
        return num_rows - num_left_out * (num_layers - EVICTING_LAYER - 1) // num_layers

    def record(self, index: int, results: Results) -> dict[str, Any]:
        """The rows of the block that go on after the second layer."""
        if self.states[index] is None:
            return {}
        block = _block(self.batch.plans[index], self.batch.canvases[index])
        finished = self.finished_positions[index]
        return {"selected_positions": [finished[finished >= block.start].tolist()]}


def _block(plan: StepPlan, canvas: Canvas) -> Span:
    """The running block, with its decided tokens before the masks."""
    return canvas.spec.layout.from_block_start(plan.window)
