"""Recorded forward passes."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_engine.model_executor.batch_tables import KVTables
from dllm_engine.model_executor.canvas_store import SPARE
from dllm_engine.model_executor.graphs.recording import (
    HOST_BOUND_ROWS,
    Record,
    most_padding,
    padded,
    padded_requests,
    worth_padding,
)
from dllm_engine.model_executor.passes.base import (
    DensePass,
    LayerPass,
    Repeats,
    Results,
    can_join,
)
from dllm_engine.model_executor.passes.paged import PagedPass
from dllm_engine.model_executor.rank import Rank
from dllm_engine.model_executor.step_batch import SplitRows, StepBatch
from dllm_engine.model_executor.transfer import on_device

NO_LIMIT = torch.iinfo(torch.int32).max


class ForwardSize(NamedTuple):
    """Key of a forward graph."""

    num_requests: int
    num_rows: int
    longest: int
    """Upper bound of the rows of a request."""
    reads: bool
    """True if requests attend to pages."""
    overwrites: bool
    """True if rows are written to pages before attention reads them there."""
    adds: bool
    """True if rows are written to pages where no row of the pass reads them."""
    limited: bool
    """True if rows have limits."""

    @classmethod
    def of(
        cls, batch: StepBatch, layer_pass: PagedPass | DensePass
    ) -> "ForwardSize | None":
        """Size of the smallest graph for a pass; None if it is faster to launch the
        pass.
        """
        num_requests = len(batch.sizes)
        num_rows = batch.bounds[-1]
        longest = max(batch.sizes)
        rows = padded(num_rows)
        limited = batch.limits is not None
        if rows is None or not worth_padding(num_rows, rows):
            return None
        plain = PagedPass if isinstance(layer_pass, PagedPass) else DensePass
        if not can_join(layer_pass) or type(layer_pass).attend is not plain.attend:
            return None
        reads = writes = overwrites = False
        if isinstance(layer_pass, PagedPass):
            reads = layer_pass.rows.num_paged_rows > 0
            writes = layer_pass.row_slots is not None
            overwrites = writes and reads and not layer_pass.attend_fresh
        if rows > HOST_BOUND_ROWS and (writes or not reads):
            # Launching such a pass is as fast, and the slots of so many rows take tens
            # of MiB.
            return None
        if not reads:
            num_requests = num_requests + (rows > num_rows)
            longest = max(longest, most_padding(rows))
        adds = writes and not overwrites
        return cls(
            padded_requests(num_requests),
            rows,
            padded(longest) or rows,
            reads,
            overwrites,
            adds,
            limited,
        )


class ForwardGraph:
    """Recorded pass of requests that attend to their pages and to their own rows.

    The rows of the batch come first. Padding rows behind them belong to no request. If
    attention reads no pages, they attend to each other: their results must be numbers,
    because FlashAttention 3 reads values beyond a sequence and multiplies them by 0.
    """

    def __init__(self, rank: Rank, record: Record, size: ForwardSize) -> None:
        model, store, pages = rank.model, rank.store, rank.pages
        num_requests = size.num_requests
        num_rows = size.num_rows
        device = store.tokens.device
        self.places = torch.full((num_rows,), SPARE, device=device)
        self.positions = torch.zeros_like(self.places)
        self.limits = (
            torch.zeros_like(self.places, dtype=torch.int32) if size.limited else None
        )
        alone = [not size.reads] * num_requests
        rows = SplitRows(
            [num_rows, *[0] * (num_requests - 1)], alone, device, self.limits
        )
        rows.paged.max_seqlen = rows.alone.max_seqlen = size.longest
        rows.alone.is_padded = True
        self.cu_seqlens = (rows.paged if size.reads else rows.alone).cu_seqlens
        self.size = size
        self.max_head_len = 0
        self.tokens: KVTables | None = None
        self.row_slots: Tensor | None = None
        own_pass: LayerPass = DensePass(rows.alone)
        if pages is not None and (size.reads or size.adds):
            self.max_head_len = rank.max_pages * pages.page_size
            table = model.config.num_hidden_layers, num_requests, rank.max_pages
            head_len = torch.zeros(num_requests, dtype=torch.int32, device=device)
            tables = torch.zeros(table, dtype=torch.int32, device=device)
            self.tokens = KVTables(pages, tables, head_len, self.max_head_len)
            if size.overwrites or size.adds:
                shape = model.config.num_hidden_layers, num_rows, pages.num_kv_heads
                self.row_slots = torch.full(shape, -1, device=device)
            own_pass = PagedPass(
                self.tokens, rows, self.row_slots, attend_fresh=not size.overwrites
            )
        self.holds: LayerPass | None = None
        places = self.places
        positions = self.positions
        self.launch = lambda: model(store.tokens[places], positions, own_pass)[0]
        self.replay = record(self.launch)

    def __call__(self, batch: StepBatch, layer_pass: PagedPass | DensePass) -> Tensor:
        """Replay the graph. Returns the hidden states ``[num_rows of the batch,
        hidden_size]``, which the next replay of any graph overwrites.
        """
        # Without new inputs, the graph runs on those of the last step.
        if self.holds is not layer_pass or layer_pass.repeats is Repeats.AFTER_FOLLOW:
            self._take(batch, layer_pass)
            self.holds = layer_pass
        hidden: Tensor = self.replay()
        return hidden[: batch.bounds[-1]]

    def fill_up(self, page: int) -> int:
        """Write the inputs of a made-up batch, whose tokens are all in one page of the
        pool. Returns its rows.
        """
        rows = torch.arange(self.places.shape[0], device=self.places.device)
        self.places.fill_(SPARE)
        self.positions.copy_(rows % 2)  # a length that every canvas has
        bounds = (torch.arange(self.size.num_requests + 1) * self.size.longest).clamp(
            max=len(rows)
        )
        self.cu_seqlens.copy_(bounds)
        if self.tokens is not None:
            self.tokens.tables.fill_(page)
            self.tokens.set_lengths(
                torch.full_like(self.tokens.token_lens, self.max_head_len)
            )
            if self.row_slots is not None:
                pages = self.tokens.pages
                slots = pages.slots(page * pages.page_size + rows[: pages.page_size])
                self.row_slots.fill_(-1)[:, : pages.page_size] = slots
        if self.limits is not None:
            self.limits.copy_(self.max_head_len + 1 + rows % 2)
        self.holds = None
        return int(bounds[-1])

    def _take(self, batch: StepBatch, layer_pass: PagedPass | DensePass) -> None:
        num_rows = batch.bounds[-1]
        num_requests = len(batch.plans)
        self.places[:num_rows] = batch.places
        self.positions[:num_rows] = batch.positions
        bounds = batch.bounds + [num_rows] * (
            self.cu_seqlens.shape[0] - len(batch.bounds)
        )
        if not self.size.reads:
            bounds[-1] = len(self.places)
        self.cu_seqlens.copy_(on_device(bounds, self.places.device, torch.int32))
        if self.limits is not None:
            self.limits[:num_rows] = NO_LIMIT if batch.limits is None else batch.limits
        if self.tokens is None or not isinstance(layer_pass, PagedPass):
            return
        tokens = layer_pass.tokens
        slots = layer_pass.row_slots
        self.tokens.tables[:, :num_requests, : tokens.tables.shape[2]] = tokens.tables
        self.tokens.set_lengths(tokens.token_lens)
        if self.row_slots is not None and slots is not None:
            self.row_slots[:, :num_rows] = slots
            self.row_slots[:, num_rows:] = -1


class LayoutGraph:
    """Recorded pass of a cache method whose layers choose rows. It replays passes of
    the same layout.
    """

    def __init__(
        self, rank: Rank, record: Record, batch: StepBatch, layer_pass: LayerPass
    ) -> None:
        model = rank.model
        store = rank.store
        self.inputs = self._inputs(batch, layer_pass)
        places, positions = self.inputs[:2]
        self.holds = self.recorded_pass = layer_pass
        """The graph also reads other tensors of the recorded pass, so it must be kept.
        """
        layer_pass.recorded = True
        # The pass is not launched first, because it would overwrite the state of the
        # last step, by which rows are chosen.
        self.replay = record(
            lambda: model(store.tokens[places], positions, layer_pass),
            launch_first=False,
        )

    def __call__(
        self, batch: StepBatch, layer_pass: LayerPass
    ) -> tuple[Tensor, Results]:
        """Replay the graph. Returns the hidden states ``[num_rows, hidden_size]``,
        which the next replay of any graph overwrites, and the results of the pass.
        """
        if self.holds is not layer_pass or layer_pass.repeats is Repeats.AFTER_FOLLOW:
            inputs = self._inputs(batch, layer_pass)
            # One launch copies all tensors of a type.
            for dtype in {tensor.dtype for tensor in inputs}:
                pairs = [
                    pair
                    for pair in zip(self.inputs, inputs, strict=True)
                    if pair[1].dtype is dtype
                ]
                torch._foreach_copy_(
                    [target for target, _ in pairs], [source for _, source in pairs]
                )
            self.holds = layer_pass
        hidden, results = self.replay()
        return hidden[: batch.bounds[-1]], [result.clone() for result in results]

    @staticmethod
    def _inputs(batch: StepBatch, layer_pass: LayerPass) -> list[Tensor]:
        """Tensors that the graph reads: places and positions of rows, and
        ``GraphParts.inputs``.
        """
        parts = layer_pass.graph_parts()
        assert parts is not None
        more = max(parts.num_rows - batch.bounds[-1], 0)
        rows = [
            F.pad(batch.places, (0, more), value=SPARE),
            F.pad(batch.positions, (0, more)),
        ]
        return rows + parts.inputs
