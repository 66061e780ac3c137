"""FOCUS (arXiv 2601.23278): a pass over the running block that drops, in its second
layer, the masked rows that it does not expect to decode.

Keys and values of the whole canvas are kept by position. Every row that a layer
computes overwrites its own, and attends to everything up to the rightmost row of the
pass: also to rows that are not in it, as the last pass left them that computed them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from vllm.distributed import tensor_model_parallel_all_reduce

from dllm_engine.cache_methods.focus.method import FocusOptions, FocusStep
from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.step_plan import StepPlan
from dllm_engine.model_executor.batch_tables import TokenTables
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import LayerPass, Results, attend_split
from dllm_engine.model_executor.step_batch import SplitRows, StepBatch
from dllm_engine.model_executor.transfer import on_device

EVICTING_LAYER = 1
"""The importance of a row is compared between the layer before this one and this one,
which drops rows.
"""
POOL_KERNEL_SIZE = 3
"""Neighbouring masked keys of which the highest score counts."""


@dataclass(frozen=True)
class BlockState:
    """State of a request's block between passes."""

    keep: int
    """Masked rows that a pass keeps at least, ``k`` in the paper."""
    num_passes: int = 0
    num_filled: int = 0
    processed: int = 0
    """The block's positions before this one went through all layers."""

    def next_block(self, start: int, options: FocusOptions) -> "BlockState":
        """The state at the start of a block at ``start``."""
        keep = self.keep
        if options.first_keep == "alpha" and options.alpha > 0:
            keep = math.ceil(options.alpha)
        return BlockState(keep, processed=start)

    def after(
        self, num_filled: int, processed: int, options: FocusOptions
    ) -> "BlockState":
        """The state after a pass that filled so many tokens, and whose rows before
        ``processed`` went through all layers.
        """
        num_passes = self.num_passes + 1
        filled = self.num_filled + num_filled
        keep = self.keep
        if options.alpha > 0:
            keep = max(math.ceil(options.alpha * filled / num_passes), 1)
        return BlockState(keep, num_passes, filled, max(self.processed, processed))


class FocusPass(LayerPass):
    """Requests in every phase share the pass. Those that feed prompts or a decision, or
    have few masked rows left, keep all rows.
    """

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        self.batch, self.pages = batch, pages
        self.options = options = FocusOptions.of(batch.canvases[0].spec)
        self.num_layers = pages.geometry.num_layers
        self.states: list[BlockState | None] = []
        """The state of each request before the pass; None: it is a step of block
        diffusion alone.
        """
        for plan, canvas in zip(batch.plans, batch.canvases, strict=True):
            step: FocusStep | None = plan.own
            if step is None:
                self.states.append(None)
                continue
            state = canvas.own or BlockState(options.keep)
            if step.begins_block:
                state = state.next_block(_block(plan, canvas).start, options)
            self.states.append(state)
        self.masked: dict[int, np.ndarray] = {}
        """Masked positions of the requests that drop rows."""
        if options.select != "none" and self.num_layers > EVICTING_LAYER:
            for index, state in enumerate(self.states):
                if state is None:
                    continue
                block = _block(batch.plans[index], batch.canvases[index])
                known = batch.canvases[index].known[slice(*block)]
                masked = block.start + np.flatnonzero(known < 0)
                if masked.size > state.keep:
                    self.masked[index] = masked
        last_rows = np.array(batch.bounds[1:]) - 1
        ends = (batch.host_positions[last_rows] + 1).tolist()
        self.tables = TokenTables(batch, pages, head_len=ends)
        # Where all that is read is computed, the pages would give back what was just
        # computed.
        self.alone = [
            size == end and index not in self.masked
            for index, (size, end) in enumerate(zip(batch.sizes, ends, strict=True))
        ]
        self.rows = batch.split_rows(self.alone)
        if self.masked:
            self._lay_out_masked()

    def _lay_out_masked(self) -> None:
        """Set the masked rows ``[requests, most masked rows]`` of those that drop rows,
        filled up with row 0, and which of them are real.
        """
        shape = len(self.masked), max(map(len, self.masked.values()))
        rows = np.zeros(shape, dtype=np.int64)
        real = np.zeros(shape, dtype=bool)
        for line, (index, masked) in enumerate(self.masked.items()):
            own = self.batch.host_positions[self.batch.rows(index)]
            first = self.batch.bounds[index]
            rows[line, : masked.size] = first + np.searchsorted(own, masked)
            real[line, : masked.size] = True
        self.masked_rows = on_device(rows, self.batch.device)
        self.is_masked = on_device(real, self.batch.device, torch.bool)

    @staticmethod
    def positions(plan: StepPlan, canvas: Canvas) -> np.ndarray:
        """In the first pass of a block all rows. Later those that are masked, or were
        before the last pass, or whose right neighbour was.
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

    def finished(self, results: Results) -> tuple[torch.Tensor, Sequence[int]] | None:
        if not self.masked:
            return None
        is_finished, kept = results
        first_kept = np.searchsorted(kept.numpy(), self.batch.bounds)
        return is_finished, np.diff(first_kept).tolist()

    def __call__(
        self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases
    ) -> tuple[torch.Tensor, Results]:
        """The results are, where rows are dropped, those of ``finished``, and the rows
        that went on, which the host has.
        """
        slots = self.tables.row_slots()
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        split = self.rows
        x, importance = hidden, hidden.new_zeros(())
        for index, layer in enumerate(layers):
            q, k, v = layer.qkv(layer.attn_norm(x), phases)
            self.pages.write(k, v, slots[index], rows)
            if self.masked and index <= EVICTING_LAYER:
                before = importance
                importance = self._importance(q, k)
            if self.masked and index == EVICTING_LAYER:
                kept = self._kept_rows(importance - before)
                rows = on_device(np.concatenate(kept), hidden.device)
                x, phases = x[rows], phases[rows]
                q, k, v = q[rows], k[rows], v[rows]
                limits = self.batch.limits
                limits = None if limits is None else limits[rows]
                sizes = [len(own) for own in kept]
                split = SplitRows(sizes, self.alone, hidden.device, limits)
            attended = layer.o_proj(
                attend_split(index, self.tables, (q, k, v), split, attend_fresh=False)
            )
            x += layer.mlp(layer.mlp_norm(x, attended))
            if self.masked and index == EVICTING_LAYER:
                ends = [self.batch.host_positions[own[-1]] + 1 for own in kept]
                self.tables.set_lengths(
                    on_device(np.array(ends), hidden.device, torch.int32)
                )
        if not self.masked:
            return x, ()
        hidden[rows] = x
        finished = torch.zeros(hidden.shape[0], dtype=torch.bool, device=hidden.device)
        finished.index_fill_(0, rows, True)
        return hidden, (finished, torch.from_numpy(np.concatenate(kept)))

    def _importance(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The attention that each masked row gets from the masked rows of its request,
        over all heads, float32 ``[requests, most masked rows]``; the paper's I.
        """
        queries = q[self.masked_rows].float()
        keys = k[self.masked_rows].float()
        # Query heads share KV heads in consecutive groups.
        queries = queries.unflatten(2, (keys.shape[2], -1))
        scores = torch.einsum("rihgd,rjhd->rhgij", queries, keys).flatten(1, 2)
        scores = scores / math.sqrt(q.shape[-1])
        is_key = self.is_masked[:, None, None, :]
        scores = scores.masked_fill(~is_key, -math.inf)
        highest = F.max_pool1d(
            scores.flatten(0, 2), POOL_KERNEL_SIZE, 1, POOL_KERNEL_SIZE // 2
        ).view_as(scores)
        attention = highest.masked_fill(~is_key, -math.inf).softmax(dim=-1)
        return (attention * self.is_masked[:, None, :, None]).sum(dim=(1, 2))

    def _kept_rows(self, rises: torch.Tensor) -> list[np.ndarray]:
        """Rows of the batch that go on, by request; ``rises`` as ``_importance``."""
        # Every rank scores with its own heads; all must keep the same rows. The host
        # waits here: how many rows go on is its choice of shapes.
        rises_of_requests = tensor_model_parallel_all_reduce(rises).cpu().numpy()
        kept = [
            np.arange(*bounds)
            for bounds in zip(self.batch.bounds, self.batch.bounds[1:], strict=False)
        ]
        for line, (index, masked) in enumerate(self.masked.items()):
            state = self.states[index]
            assert state is not None
            stays = selected(
                rises_of_requests[line, : masked.size], masked, state, self.options
            )
            own = self.batch.host_positions[kept[index]]
            kept[index] = kept[index][~np.isin(own, masked[~stays])]
        return kept

    def take_answers(
        self, index: int, results: Results, answers: Sequence[np.ndarray]
    ) -> int | None:
        state = self.states[index]
        canvas = self.batch.canvases[index]
        if state is not None:
            processed = int(self._finished_positions(index, results)[-1]) + 1
            canvas.own = state.after(len(canvas.last_unmasked), processed, self.options)
        return None

    def _finished_positions(self, index: int, results: Results) -> np.ndarray:
        rows = np.arange(*self.batch.bounds[index : index + 2])
        if index in self.masked:
            rows = np.intersect1d(rows, results[1].numpy(), assume_unique=True)
        return self.batch.host_positions[rows]

    def rows_computed(self, index: int, num_rows: int, results: Results) -> int:
        num_finished = self._finished_positions(index, results).size
        first = EVICTING_LAYER + 1
        rest = self.num_layers - EVICTING_LAYER - 1
        return -(-(first * num_rows + rest * num_finished) // self.num_layers)

    def record(self, index: int, results: Results) -> dict[str, Any]:
        """The rows of the block that go on behind the second layer."""
        if self.states[index] is None:
            return {}
        block = _block(self.batch.plans[index], self.batch.canvases[index])
        finished = self._finished_positions(index, results)
        return {"selected_positions": [finished[finished >= block.start].tolist()]}


def selected(
    rises: np.ndarray, masked: np.ndarray, state: BlockState, options: FocusOptions
) -> np.ndarray:
    """Masked rows that go on, bool ``[masked rows]``. ``rises``: of each one's
    importance between the first two layers.

    They are those that rise most, the left neighbours of these, and every row left of
    them that no pass over the block has processed yet: what follows attends to it.
    """
    chosen = np.zeros(masked.size, dtype=bool)
    if options.select == "dynamic":
        wide = rises.astype(np.float64)
        deviation = wide.std(ddof=int(options.deviation == "sample"))
        chosen = wide >= wide.mean() + deviation
    if np.count_nonzero(chosen) < state.keep:
        chosen = np.zeros(masked.size, dtype=bool)
        chosen[np.argsort(-rises, kind="stable")[: state.keep]] = True
    chosen = chosen | np.isin(masked + 1, masked[chosen])
    rightmost = masked[chosen][-1]
    return chosen | ((masked < rightmost) & (masked >= state.processed))


def _block(plan: StepPlan, canvas: Canvas) -> Span:
    """The running block, with what stands before its masks."""
    return canvas.spec.layout.from_block_start(plan.window)
