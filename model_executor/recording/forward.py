"""The recorded forward pass of a step that computes few rows."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dllm_engine.model_executor.batch_tables import KVTables
from dllm_engine.model_executor.canvas_store import SPARE, CanvasStore
from dllm_engine.model_executor.layer_pass.base import LayerPass
from dllm_engine.model_executor.layer_pass.paged import PagedPass
from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.page_memory import PageView
from dllm_engine.model_executor.recording.recorder import Recorder, most_rows, padded, padded_requests
from dllm_engine.model_executor.step_batch import SplitRows, StepBatch
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.scheduler.step_plan import StepPlan

Records = Callable[[DecodingSpec, StepPlan], bool]
"""Whether a step of a request can be recorded."""
NO_LIMIT = torch.iinfo(torch.int32).max


class ForwardSize(NamedTuple):
    """What graphs differ in."""

    num_requests: int
    num_rows: int
    """The most of one request."""
    overwrites: bool
    """Whether the rows are put into pages, to be attended to there."""
    adds: bool
    """Whether some rows are put into pages beside being attended to, and rows have limits."""


def padded_size(num_rows: Sequence[int], pads: bool) -> tuple[int, int] | None:
    """Number of requests and rows of one, of a graph for requests of ``num_rows`` each; None where filling it up would
    cost more than launching does. ``pads`` as in ``Recorder``."""
    num_requests, longest = padded_requests(len(num_rows)), padded(max(num_rows))
    if longest is None or num_requests * longest > most_rows(sum(num_rows), pads):
        return None
    return num_requests, longest


def forward_size(batch: StepBatch, layer_pass: LayerPass, records: Records, pads: bool) -> ForwardSize | None:
    """The size of a graph that does what the pass does; None: it is to be launched."""
    if not (isinstance(layer_pass, PagedPass) and layer_pass.reads):
        return None
    if not all(records(canvas.spec, plan) for canvas, plan in zip(batch.canvases, batch.plans, strict=True)):
        return None
    size, writes = padded_size(layer_pass.rows.sizes, pads), layer_pass.row_slots is not None
    if size is None:
        return None
    return ForwardSize(*size, writes and not layer_pass.attend_fresh, writes and layer_pass.attend_fresh)


class ForwardGraph:
    """One recorded pass of up to so many requests, which attend to their pages and to their own rows.

    Rows lie at the front. Those behind them, which fill the graph up, are no request's: no attention reaches them.
    """

    def __init__(
        self,
        model: DiffusionDecoder,
        store: CanvasStore,
        pages: PageView,
        max_pages: int,
        record: Recorder,
        size: ForwardSize,
    ) -> None:
        """``max_pages``: the most pages of a request in a layer."""
        (num_requests, num_rows, overwrites, adds), device = size, pages.keys.device
        self.places = torch.full((num_requests * num_rows,), SPARE, device=device)
        self.positions = torch.zeros_like(self.places)
        self.max_head_len = max_pages * pages.page_size
        shape = (model.shape.num_layers, num_requests, max_pages)
        self.tokens = KVTables(
            pages,
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(num_requests, dtype=torch.int32, device=device),
            self.max_head_len,
        )
        self.limits = torch.zeros_like(self.places, dtype=torch.int32) if adds else None
        rows = SplitRows([num_rows] * num_requests, [False] * num_requests, device, self.limits)
        self.cu_seqlens = rows.paged.cu_seqlens
        nowhere = torch.full((model.shape.num_layers, num_requests * num_rows, pages.num_kv_heads), -1, device=device)
        self.row_slots = nowhere if overwrites or adds else None
        self.holds: LayerPass | None = None
        layer_pass = PagedPass(self.tokens, rows, self.row_slots, attend_fresh=not overwrites)
        places, positions = self.places, self.positions
        self.launch = lambda: model(store.tokens[places], positions, layer_pass)
        self.replay = record(self.launch)

    def __call__(self, batch: StepBatch, layer_pass: PagedPass) -> torch.Tensor:
        """Hidden states ``[num_rows of the batch, hidden_size]``, until the next replay of any graph."""
        num_rows = batch.cu_seqlens[-1]
        if self.holds is not layer_pass:  # else it runs one more step on what the last one left
            self._take(batch, layer_pass, num_rows)
            self.holds = layer_pass
        return self.replay()[:num_rows]

    def fill_up(self, page: int) -> None:
        """Take in the numbers of a made-up full batch, whose tokens are all in one page of the pool."""
        num_requests = self.tokens.head_len.shape[0]
        rows = torch.arange(self.places.shape[0], device=self.places.device)
        self.places.fill_(SPARE)
        self.positions.copy_(rows % 2)  # which every canvas has
        self.cu_seqlens.copy_(torch.arange(num_requests + 1) * (len(rows) // num_requests))
        self.tokens.tables.fill_(page)
        self.tokens.head_len.fill_(self.max_head_len)
        if self.row_slots is not None:
            pages = self.tokens.pages
            self.row_slots.fill_(-1)[:, : pages.page_size] = pages.slots(
                page * pages.page_size + rows[: pages.page_size]
            )
        if self.limits is not None:
            self.limits.copy_(self.max_head_len + rows % 2)
        self.holds = None

    def _take(self, batch: StepBatch, layer_pass: PagedPass, num_rows: int) -> None:
        num_requests, tokens, slots = len(batch.plans), layer_pass.tokens, layer_pass.row_slots
        self.places[:num_rows] = batch.places
        self.positions[:num_rows] = batch.positions
        bounds = batch.cu_seqlens + [num_rows] * (self.cu_seqlens.shape[0] - len(batch.cu_seqlens))
        self.cu_seqlens.copy_(on_device(bounds, self.places.device, torch.int32))
        self.tokens.tables[:, :num_requests, : tokens.tables.shape[2]] = tokens.tables
        self.tokens.head_len[:num_requests] = tokens.head_len
        # What is left of an earlier batch: pages that it had may be another's by now.
        self.tokens.head_len[num_requests:] = 0
        if self.row_slots is not None and slots is not None:
            self.row_slots[:, :num_rows], self.row_slots[:, num_rows:] = slots, -1
        if self.limits is not None:
            self.limits[:num_rows] = NO_LIMIT if batch.limits is None else batch.limits
