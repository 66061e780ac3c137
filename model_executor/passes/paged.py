"""Passes that compute every row in every layer, and also attend to tokens in pages."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from dllm_engine.decoding.page_layout import PageKind
from dllm_engine.decoding.step_plan import RefreshState, StepPlan
from dllm_engine.model_executor.batch_tables import ALL_LAYERS, KVTables, TokenTables
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import (
    AttendingPass,
    DensePass,
    LayerPass,
    Repeats,
    Results,
    attend_split,
)
from dllm_engine.model_executor.step_batch import SplitRows, StepBatch, ranges
from dllm_engine.model_executor.transfer import on_device


class PagedPass(AttendingPass):
    """Pass whose rows attend to retained tokens in pages and to fresh rows. The host
    reads no tensor of it."""

    def __init__(
        self,
        tokens: KVTables,
        rows: SplitRows,
        slots: Tensor | None = None,
        *,
        attend_fresh: bool = True,
    ) -> None:
        """``rows``: requests that read no ``tokens`` attend alone. ``slots``: slots to
        which keys and values of the rows are written before attention, int64
        ``[num_layers, num_rows, num_kv_heads]``; None: they are not written. With
        ``attend_fresh`` a row also attends to the rows of its request."""
        self.tokens = tokens
        self.rows = rows
        self.row_slots = slots
        self.attend_fresh = attend_fresh

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.row_slots is not None:
            self.tokens.pages.write(k, v, self.row_slots[layer])
        qkv = (q, k, v)
        fresh = self.attend_fresh
        return attend_split(layer, self.tokens, qkv, self.rows, attend_fresh=fresh)


class OverwritePass(PagedPass):
    """Pass that keeps K/V by canvas position. K/V of every computed row replace those
    at its position, and rows attend to the kept canvas, up to the tokens that their
    plans read."""

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        reads = [plan.read for plan in batch.plans]
        self.batch = batch
        tokens = TokenTables(batch, pages, head_len=reads)
        tokens.check_room(batch.plans)
        rows = batch.split_rows(batch.computes_all(reads))
        super().__init__(tokens, rows, tokens.row_slots(), attend_fresh=False)
        if batch.only_reuses:
            self.repeats = Repeats.SAME_WORK


class AddingPass(PagedPass):
    """Paged pass in which UPDATE requests add tokens to pages.

    Requests in every refresh state share the pass. Each attends to its own rows and to
    the tokens in pages that its plan reads. UPDATE requests write the tokens that they
    retain behind the tokens that they read.
    """

    def __init__(
        self,
        batch: StepBatch,
        pages: PageMemory,
        reading: Sequence[str] | None = None,
        adding: Sequence[str] | None = None,
    ) -> None:
        """``reading``, ``adding``: kinds of the tables that each request reads from and
        adds to. If both are the same, a request adds behind the tokens that it reads.
        None: tables of keys and values."""
        kinds = [PageKind.KV] * len(batch.plans)
        reading = reading or kinds
        adding = adding or kinds
        self.batch = batch
        self.reading = tokens = TokenTables(batch, pages, reading)
        tokens.check_room(batch.plans)
        super().__init__(
            tokens, batch.split_rows([not plan.read for plan in batch.plans])
        )
        plans = enumerate(batch.plans)
        self.updating = [i for i, plan in plans if plan.state is RefreshState.UPDATE]
        """Indices of the UPDATE requests in the batch."""
        if not self.updating:
            self.repeats = Repeats.ONLY_FILLS
            return
        counts = [
            sum(retention.count for retention in batch.plans[i].adds)
            for i in self.updating
        ]
        self.bounds = [0, *accumulate(counts)]
        """Bounds of the tokens that each of ``updating`` adds to pages."""
        firsts = [
            batch.plans[i].read if adding[i] == reading[i] else 0 for i in self.updating
        ]
        places = np.repeat(self.updating, counts), ranges(firsts, counts)[1]
        added_to = tokens if adding == reading else TokenTables(batch, pages, adding)
        self.slots = added_to.token_slots(
            ALL_LAYERS, *on_device(np.stack(places), batch.device).unbind()
        )
        """Slots of each added token, per layer."""
        named = [self.batch_rows(i, _named_rows(batch.plans[i])) for i in self.updating]
        self.named_rows = on_device(np.concatenate(named), batch.device)
        """Batch rows of the positions in ``plan.adds`` of each of ``updating``."""

    def batch_rows(self, index: int, request_rows: np.ndarray) -> np.ndarray:
        """Indices in the batch of rows of a request. ``request_rows``: their indices in
        the request.
        """
        return self.batch.bounds[index] + request_rows

    def _keep_anchors(self, row_slots: Tensor) -> None:
        """Set the slots of rows at the beginning of a canvas that requests read and
        compute again.
        """
        batch = self.batch
        numbers = np.repeat([plan.num_anchored for plan in batch.plans], batch.sizes)
        anchors = np.flatnonzero(batch.host_positions < numbers)
        if anchors.size:
            rows = on_device(anchors, batch.device)
            places = ALL_LAYERS, batch.requests[rows], batch.positions[rows]
            row_slots.index_copy_(1, rows, self.reading.token_slots(*places))

    def added(self, index: int) -> slice | None:
        """The tokens that a request adds to pages, as a slice of the tokens of all
        ``updating``; None if it adds none.
        """
        if index not in self.updating:
            return None
        at = self.updating.index(index)
        return slice(*self.bounds[at : at + 2])


class RetentionPass(AddingPass):
    """Pass that retains every position that a plan adds. An UPDATE reads a beginning of
    the canvas.
    """

    def __init__(
        self,
        batch: StepBatch,
        pages: PageMemory,
        reading: Sequence[str] | None = None,
    ) -> None:
        super().__init__(batch, pages, reading, reading)
        if self.updating:
            shape = self.slots.shape[0], batch.bounds[-1], self.slots.shape[2]
            self.row_slots = self.slots.new_full(shape, -1).index_copy_(
                1, self.named_rows, self.slots
            )
            self._keep_anchors(self.row_slots)

    def record(self, index: int, results: Results) -> dict[str, Any]:
        added = self.added(index)
        if added is None:
            return {}
        positions = self.batch.positions[self.named_rows[added]].tolist()
        retained = [*range(self.batch.plans[index].read), *positions]
        return {"retained_positions": [sorted(retained)] * self.slots.shape[0]}


class WholePass(DensePass):
    """Pass that computes all rows of its plans, and uses pages only for shared prompts."""

    @classmethod
    def of(cls, batch: StepBatch, pages: PageMemory) -> LayerPass:
        if any(plan.read or plan.adds for plan in batch.plans):
            return RetentionPass(batch, pages)
        return DensePass(batch, pages)


def _named_rows(plan: StepPlan) -> np.ndarray:
    """Rows of the positions that a plan adds, counted from the first row of the
    request; negative for positions that are only in pages.
    """
    spans = [span for retention in plan.adds for span in retention.spans]
    positions = ranges([span.start for span in spans], [span.size for span in spans])[1]
    rows = positions - plan.span.start
    rows[rows >= 0] += plan.num_anchored
    anchors = positions < plan.num_anchored
    rows[anchors] = positions[anchors]
    return rows
