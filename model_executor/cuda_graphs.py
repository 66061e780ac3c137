"""CUDA graphs: one launch for the hundreds of kernels of a forward pass, and of filling in its tokens.

A step that computes few rows keeps a GPU busy for less time than the host needs to launch its kernels. The forward pass
of such a step differs from another's in the contents of a few tensors alone, and so does filling in its tokens. Each is
recorded over tensors of a rounded size and replayed over what later batches put into them.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import GraphCaptureContext

from dllm_engine.model_executor.batch_tables import KVTables
from dllm_engine.model_executor.candidates import ALONE, BatchCandidates
from dllm_engine.model_executor.canvas_store import SPARE, CanvasStore
from dllm_engine.model_executor.filling import Filled, FillInputs, FillWork, Number, fill, response_places
from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.page_memory import PageView
from dllm_engine.model_executor.passes.base import LayerPass
from dllm_engine.model_executor.passes.dense import DensePass
from dllm_engine.model_executor.passes.paged import PagedPass
from dllm_engine.model_executor.step_batch import PaddedRows, StepBatch
from dllm_engine.model_executor.token_prediction import TokenPredictor
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics, required

MAX_GRAPHS = 128
"""Graphs kept of each kind; the least recently replayed one goes first."""
SIZES = (4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of rows that graphs are recorded for, beside multiples of the last."""
MAX_ROWS = 4096
"""The most rows of a graph."""
HOST_BOUND_ROWS = 1024
"""Rows that a GPU computes in about the time that launching a pass takes."""
LAUNCHES_BEFORE = 2
"""Times that work of a kind is launched before it is recorded, if warm-up has not recorded it."""
NO_LIMIT = torch.iinfo(torch.int32).max

Run = Callable[[], Any]


class Record(Protocol):
    """Records work on tensors that stay where they are."""

    def __call__(self, run: Run, *, launch_first: bool = True) -> Run:
        """Return a function that does the work of ``run`` again, into the same result.

        ``launch_first``: do the work once before, because kernels are compiled and workspaces allocated by it, which
        must not happen while recording.
        """


_Key = TypeVar("_Key", bound=Hashable)
_Graph = TypeVar("_Graph")


class GraphRecorder:
    """``Record`` on a GPU. Its graphs share one memory pool and one stream: no two of them run at a time."""

    def __init__(self, device: torch.device) -> None:
        self.context = GraphCaptureContext(torch.cuda.Stream(device))
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run, *, launch_first: bool = True) -> Run:
        graph = torch.cuda.CUDAGraph()
        # vLLM's context: the all-reduces of tensor parallelism have to know.
        with get_tp_group().graph_capture(self.context):
            if launch_first:
                run()
            with torch.cuda.graph(graph, self.pool, self.context.stream, capture_error_mode="thread_local"):
                result = run()

        def replay() -> Any:
            graph.replay()
            return result

        return replay


class GraphCache(Generic[_Key, _Graph]):
    """Graphs by what they compute."""

    def __init__(self) -> None:
        self.graphs: OrderedDict[_Key, _Graph] = OrderedDict()
        self.num_launched: Counter[_Key] = Counter()

    def get(self, key: _Key, make: Callable[[], _Graph], after: int = 0) -> _Graph | None:
        """The graph; one that is not there is made once it has been asked for more than ``after`` times. None: launch
        the step."""
        if key not in self.graphs:
            self.num_launched[key] += 1
            if self.num_launched[key] <= after:
                return None
            if len(self.graphs) == MAX_GRAPHS:
                self.graphs.popitem(last=False)
            self.num_launched.clear()
            self.graphs[key] = make()
        self.graphs.move_to_end(key)
        return self.graphs[key]


def padded(number: int) -> int | None:
    """The next of ``SIZES``, or multiple of the last; None beyond ``MAX_ROWS``."""
    if number > SIZES[-1]:
        number = -(-number // SIZES[-1]) * SIZES[-1]
        return number if number <= MAX_ROWS else None
    return next(size for size in SIZES if number <= size)


def padded_requests(num_requests: int) -> int:
    """The number of requests that a graph for so many is recorded with: 1, 2, 4, or a multiple of 8."""
    return next((size for size in (1, 2, 4) if num_requests <= size), -(-num_requests // 8) * 8)


def worth_padding(num_rows: int, padded_rows: int) -> bool:
    """Return True if a graph of ``padded_rows`` does the work of ``num_rows`` sooner than launches do."""
    return padded_rows <= max(HOST_BOUND_ROWS, num_rows + num_rows // 16)


class ForwardSize(NamedTuple):
    """Key of a forward graph."""

    num_requests: int
    num_rows: int
    longest: int
    """The most rows of one request."""
    reads: bool
    """True if requests attend to pages."""
    overwrites: bool
    """True if rows are written to pages before attention reads them there."""
    adds: bool
    """True if rows are written to pages where no row of the pass reads them."""
    limited: bool
    """True if rows have limits."""

    @classmethod
    def of(cls, batch: StepBatch, layer_pass: PagedPass | DensePass) -> "ForwardSize | None":
        """The smallest graph for a pass; None: launching takes less time."""
        sizes, num_rows = [batch.num_rows(i) for i in range(len(batch.plans))], batch.cu_seqlens[-1]
        rows, longest, limited = padded(num_rows), padded(max(sizes)), batch.limits is not None
        if rows is None or longest is None or not worth_padding(num_rows, rows):
            return None
        if type(layer_pass).__call__ is not LayerPass.__call__ or layer_pass.chooses:
            return None
        reads = writes = overwrites = False
        if isinstance(layer_pass, PagedPass):
            if type(layer_pass).attend is not PagedPass.attend:
                return None
            reads, writes = layer_pass.rows.num_paged_rows > 0, layer_pass.row_slots is not None
            overwrites = writes and reads and not layer_pass.attend_fresh
        return cls(padded_requests(len(sizes)), rows, longest, reads, overwrites, writes and not overwrites, limited)


class ForwardGraph:
    """One recorded pass of up to so many requests, which attend to their pages and to their own rows.

    Rows lie at the front. Those behind them, which fill the graph up, are no request's: no attention reaches them.
    """

    def __init__(self, engine: "StepGraphs", size: ForwardSize) -> None:
        model, store, pages = engine.model, engine.store, engine.pages
        num_requests, num_rows, device = size.num_requests, size.num_rows, store.tokens.device
        self.places = torch.full((num_rows,), SPARE, device=device)
        self.positions = torch.zeros_like(self.places)
        self.limits = torch.zeros_like(self.places, dtype=torch.int32) if size.limited else None
        alone = [not size.reads] * num_requests
        rows = PaddedRows(num_rows, size.longest, alone, device, self.limits)
        self.cu_seqlens = (rows.paged if size.reads else rows.alone).cu_seqlens
        self.tokens: KVTables | None = None
        self.row_slots: torch.Tensor | None = None
        self.longest, self.max_head_len = size.longest, 0
        own_pass: LayerPass = DensePass(rows.alone)
        if pages is not None and (size.reads or size.adds):
            self.max_head_len = engine.max_pages * pages.page_size
            table = model.shape.num_layers, num_requests, engine.max_pages
            head_len = torch.zeros(num_requests, dtype=torch.int32, device=device)
            tables = torch.zeros(table, dtype=torch.int32, device=device)
            self.tokens = KVTables(pages, tables, head_len, self.max_head_len)
            if size.overwrites or size.adds:
                shape = model.shape.num_layers, num_rows, pages.num_kv_heads
                self.row_slots = torch.full(shape, -1, device=device)
            own_pass = PagedPass(self.tokens, rows, self.row_slots, attend_fresh=not size.overwrites)
        self.holds: LayerPass | None = None
        places, positions = self.places, self.positions
        self.launch = lambda: model(store.tokens[places], positions, own_pass)
        self.replay = engine.record(self.launch)

    def __call__(self, batch: StepBatch, layer_pass: PagedPass | DensePass) -> torch.Tensor:
        """Hidden states ``[num_rows of the batch, hidden_size]``, until the next replay of any graph."""
        if self.holds is not layer_pass:  # else it runs one more step on what the last one left
            self._take(batch, layer_pass)
            self.holds = layer_pass
        hidden: torch.Tensor = self.replay()
        return hidden[: batch.cu_seqlens[-1]]

    def fill_up(self, page: int) -> int:
        """Take in the numbers of a made-up batch, whose tokens are all in one page of the pool. Returns its rows."""
        num_requests = self.cu_seqlens.shape[0] - 1
        rows = torch.arange(self.places.shape[0], device=self.places.device)
        self.places.fill_(SPARE)
        self.positions.copy_(rows % 2)  # which every canvas has
        bounds = (torch.arange(num_requests + 1) * self.longest).clamp(max=len(rows))
        self.cu_seqlens.copy_(bounds)
        if self.tokens is not None:
            self.tokens.tables.fill_(page)
            self.tokens.set_lengths(self.max_head_len)
            if self.row_slots is not None:
                pages = self.tokens.pages
                slots = pages.slots(page * pages.page_size + rows[: pages.page_size])
                self.row_slots.fill_(-1)[:, : pages.page_size] = slots
        if self.limits is not None:
            self.limits.copy_(self.max_head_len + 1 + rows % 2)
        self.holds = None
        return int(bounds[-1])

    def _take(self, batch: StepBatch, layer_pass: PagedPass | DensePass) -> None:
        num_rows, num_requests = batch.cu_seqlens[-1], len(batch.plans)
        self.places[:num_rows] = batch.places
        self.positions[:num_rows] = batch.positions
        bounds = batch.cu_seqlens + [num_rows] * (self.cu_seqlens.shape[0] - len(batch.cu_seqlens))
        self.cu_seqlens.copy_(on_device(bounds, self.places.device, torch.int32))
        if self.limits is not None:
            self.limits[:num_rows] = NO_LIMIT if batch.limits is None else batch.limits
        if self.tokens is None or not isinstance(layer_pass, PagedPass):
            return
        tokens, slots = layer_pass.tokens, layer_pass.row_slots
        self.tokens.tables[:, :num_requests, : tokens.tables.shape[2]] = tokens.tables
        self.tokens.set_lengths(tokens.token_lens)
        if self.row_slots is not None and slots is not None:
            self.row_slots[:, :num_rows], self.row_slots[:, num_rows:] = slots, -1


class LayoutGraph:
    """One recorded pass of a cache method whose layers choose rows. It replays passes of the same layout."""

    def __init__(self, engine: "StepGraphs", batch: StepBatch, layer_pass: LayerPass) -> None:
        model, store = engine.model, engine.store
        self.inputs = [tensor.clone() for tensor in (batch.places, batch.positions)]
        places, positions = self.inputs
        self.inputs += layer_pass.graph_inputs()
        self.holds = layer_pass
        self.recorded_pass = layer_pass  # whose other tensors the recorded work reads as well

        def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
            return model(store.tokens[places], positions, layer_pass), layer_pass.graph_results()

        # Not launched first: rows are chosen by what the last step has left, which this work replaces.
        self.replay = engine.record(run, launch_first=False)

    def __call__(self, batch: StepBatch, layer_pass: LayerPass) -> torch.Tensor:
        """Hidden states ``[num_rows, hidden_size]``, until the next replay of any graph."""
        if self.holds is not layer_pass:
            torch._foreach_copy_(self.inputs, [batch.places, batch.positions, *layer_pass.graph_inputs()])
            self.holds = layer_pass
        hidden: torch.Tensor
        hidden, results = self.replay()
        layer_pass.take_results(results)
        return hidden


class FillingSize(NamedTuple):
    """Key of a graph that fills in tokens."""

    num_candidates: int
    width: int
    """Candidates and positions of one request."""
    num_positions: int | None
    """Positions of the responses, where some request delays end tokens."""
    has_certainty: bool
    work: FillWork


class FillingGraph:
    """The recorded filling in of up to so many candidates: the head, statistics of its logits, the choice, and the
    canvas. Candidates behind a batch's own, which fill the graph up, are no request's."""

    def __init__(self, engine: "StepGraphs", size: FillingSize) -> None:
        store, device = engine.store, engine.store.tokens.device
        width = engine.model.shape.hidden_size
        self.hidden = torch.zeros(size.num_candidates, width, dtype=engine.dtype, device=device)
        # What fills the graph up belongs to one more request.
        self.filler = torch.tensor([engine.max_requests, 0, 0, SPARE, 0, ALONE], device=device)[:, None]
        self.no_position = self.filler[[0, 3]]
        self.inputs = FillInputs(
            self.filler.repeat(1, size.num_candidates),
            torch.zeros(len(Number), engine.max_requests + 1, dtype=torch.int64, device=device),
            torch.ones(size.num_candidates, device=device) if size.has_certainty else None,
            None if size.num_positions is None else self.no_position.repeat(1, size.num_positions),
            size.width,
        )
        self.store = store
        self.holds: BatchCandidates | None = None
        self.numbers: np.ndarray | None = None
        self.launch = lambda: fill(engine.predictor, store, engine.end_tokens, size.work, self.inputs, self.hidden)
        self.replay = engine.record(self.launch)

    def fill_up(self) -> None:
        """Take in the numbers of a made-up batch. The store must be empty."""
        table, request_numbers = self.inputs.table, self.inputs.numbers
        numbers = torch.arange(table.shape[1], device=table.device)
        requests = (numbers // self.inputs.width).clamp(max=request_numbers.shape[1] - 1)
        places = SPARE + 1 + numbers
        table.copy_(torch.stack((requests, numbers % self.inputs.width, numbers, places, numbers, numbers * 0)))
        self.hidden.copy_(torch.sin(torch.arange(self.hidden.numel(), device=numbers.device)).view_as(self.hidden))
        request_numbers.zero_()
        request_numbers.view(torch.float64)[[Number.VALUE, Number.OBSERVED]] = 0.5
        request_numbers[[Number.GUARANTEED, Number.LEAST]] = 1
        self.store.masked[places] = True
        self.holds = self.numbers = None

    def __call__(
        self, hidden: torch.Tensor, group: BatchCandidates, numbers: np.ndarray
    ) -> tuple[Filled, TokenStatistics]:
        """``hidden`` covers all rows of the batch. The statistics last until the next replay of any graph."""
        num_candidates, own = group.positions.numel(), self.inputs
        if self.holds is not group:
            own.table[:, :num_candidates], own.table[:, num_candidates:] = group.table, self.filler
            if own.certainty is not None:
                own.certainty[:num_candidates] = required(group.certainty)
            if own.responses is not None:
                places = response_places(group)
                own.responses[:, : places.shape[1]], own.responses[:, places.shape[1] :] = places, self.no_position
            self.holds = group
        if self.numbers is None or not np.array_equal(self.numbers, numbers):
            own.numbers[:, : numbers.shape[1]] = on_device(numbers, hidden.device)
            self.numbers = numbers
        torch.index_select(hidden, 0, own.table[4], out=self.hidden)
        filled, statistics = self.replay()
        rest = self.hidden.shape[0] - num_candidates
        return filled[:, :num_candidates].clone(), statistics.split([num_candidates, rest])[0] if rest else statistics


@dataclass
class StepGraphs:
    """The graphs of one engine, which run the parts of steps that they can."""

    model: DiffusionDecoder
    predictor: TokenPredictor
    store: CanvasStore
    end_tokens: torch.Tensor
    pages: PageView | None
    dtype: torch.dtype
    """Of hidden states."""
    max_pages: int
    """The most pages of a request in a layer."""
    max_requests: int
    """The most requests of a batch."""
    record: Record
    launches_before: int = 0
    """Times that work of a kind is launched before it is recorded."""
    forwards: GraphCache[ForwardSize, ForwardGraph] = field(init=False)
    layouts: GraphCache[Hashable, LayoutGraph] = field(init=False)
    fillings: GraphCache[FillingSize, FillingGraph] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.store.tokens
        self.forwards, self.layouts, self.fillings = GraphCache(), GraphCache(), GraphCache()

    def _forget_outdated(self) -> None:
        """Graphs read and write the canvases where they were recorded."""
        if self.store.tokens is not self.tokens:
            self.__post_init__()

    def problem(self, max_error: float) -> str | None:
        """Difference between a graph and the same work launched, on made-up numbers; None: none.

        For an idle engine: it writes to the first page of the pool and to the canvases. ``max_error`` is that of hidden
        states, over the largest of them.
        """
        if self.pages is not None:
            self.pages.keys[1].normal_()
            self.pages.values[1].normal_()
        for (num_requests, num_rows, *_), forward in self.forwards.graphs.items():
            used = forward.fill_up(page=1)
            launched = forward.launch()[:used].float()
            error = float((forward.replay()[:used].float() - launched).abs().max() / launched.abs().max())
            if not error <= max_error:
                return f"{num_requests} requests of {num_rows} rows are off by {error:.1e} when they are replayed"
        for size, filling in self.fillings.graphs.items():
            filling.fill_up()
            expected = filling.launch()[0].clone()
            filling.fill_up()
            if not torch.equal(filling.replay()[0], expected):
                return f"{size.num_candidates} candidates are filled otherwise when that is replayed"
        return None

    def record_forward(self, size: ForwardSize) -> ForwardGraph | None:
        """The graph of a size, as ``GraphCache.get`` gives it."""
        return self.forwards.get(size, lambda: ForwardGraph(self, size), self.launches_before)

    def record_filling(self, size: FillingSize) -> FillingGraph | None:
        """The graph of a size, as ``GraphCache.get`` gives it."""
        return self.fillings.get(size, lambda: FillingGraph(self, size), self.launches_before)

    def forward(self, batch: StepBatch, layer_pass: LayerPass) -> torch.Tensor | None:
        """Hidden states ``[num_rows, hidden_size]``, to be read before the next step; None: launch it."""
        self._forget_outdated()
        if isinstance(layer_pass, PagedPass | DensePass):
            size = ForwardSize.of(batch, layer_pass)
            forward = None if size is None else self.record_forward(size)
            return None if forward is None else forward(batch, layer_pass)
        layout = layer_pass.graph_layout()
        if layout is None:
            return None
        before = max(1, self.launches_before)
        graph = self.layouts.get(layout, lambda: LayoutGraph(self, batch, layer_pass), before)
        return None if graph is None else graph(batch, layer_pass)

    def fill(
        self, hidden: torch.Tensor, group: BatchCandidates, work: FillWork, numbers: np.ndarray
    ) -> tuple[Filled, TokenStatistics] | None:
        """``fill`` of a group, whose rows are among those of ``hidden``; None: launch it. The statistics last until the
        next replay."""
        specs = [group.batch.canvases[index].spec for index in group.members]
        num_candidates, delayed = group.positions.numel(), sum(spec.gen_length for spec in specs if spec.delay_eos)
        rows, width, positions = padded(num_candidates), padded(group.width), padded(delayed)
        if rows is None or width is None or positions is None or not worth_padding(num_candidates, rows):
            return None
        if self.predictor.tp_group.world_size > 1 or group.biased or any(spec.guidance is not None for spec in specs):
            return None
        self._forget_outdated()
        size = FillingSize(rows, width, positions if delayed else None, group.certainty is not None, work)
        graph = self.record_filling(size)
        return None if graph is None else graph(hidden, group, numbers)
