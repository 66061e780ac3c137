"""CUDA graphs: one launch for the hundreds of kernels of a forward pass, and of filling in its tokens.

A step that computes few rows keeps a GPU busy for less time than the host needs to launch its kernels. The forward pass
of such a step differs from another's in the contents of a few tensors alone, and so does filling in its tokens. Each is
recorded over tensors of a rounded size and replayed over what later batches put into them.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import GraphCaptureContext

from dllm_engine.model_executor.batch_tables import KVTables
from dllm_engine.model_executor.candidates import BatchCandidates, Choice, Filled, filled_of
from dllm_engine.model_executor.canvas_store import SPARE, CanvasStore
from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.page_memory import PageView
from dllm_engine.model_executor.passes.base import LayerPass
from dllm_engine.model_executor.passes.paged import PagedPass
from dllm_engine.model_executor.step_batch import SplitRows, StepBatch
from dllm_engine.model_executor.token_prediction import GREEDY, TokenPredictor
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.selection import select
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.scheduler.step_plan import StepPlan

MAX_GRAPHS = 64
"""Graphs kept of each kind; the least recently replayed one goes first."""
SIZES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of rows that graphs are recorded for. From the last on a GPU is busy for longer than launching takes."""
FREE_ROWS = 256
"""Rows that a GPU computes about as fast as one: reading the weights takes longer."""
NO_LIMIT = torch.iinfo(torch.int32).max

Run = Callable[[], torch.Tensor]
Record = Callable[[Run], Run]
"""Takes a function of tensors that stay where they are; returns one that does the same work again, into the same
result."""
_Key = TypeVar("_Key", bound=Hashable)
_Graph = TypeVar("_Graph")


class GraphRecorder:
    """``Record`` on a GPU. Its graphs share one memory pool and one stream: no two of them run at a time."""

    def __init__(self, device: torch.device) -> None:
        self.context = GraphCaptureContext(torch.cuda.Stream(device))
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        # vLLM's context: the all-reduces of tensor parallelism have to know.
        with get_tp_group().graph_capture(self.context):
            run()  # compiles kernels and allocates workspaces, which must not happen while recording
            with torch.cuda.graph(graph, self.pool, self.context.stream, capture_error_mode="thread_local"):
                result = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class GraphCache(Generic[_Key, _Graph]):
    """Graphs by their sizes, recorded when they are first needed."""

    def __init__(self, make: Callable[[_Key], _Graph]) -> None:
        self.make = make
        self.graphs: OrderedDict[_Key, _Graph] = OrderedDict()

    def __getitem__(self, key: _Key) -> _Graph:
        if key not in self.graphs:
            if len(self.graphs) == MAX_GRAPHS:
                self.graphs.popitem(last=False)
            self.graphs[key] = self.make(key)
        self.graphs.move_to_end(key)
        return self.graphs[key]


def padded(number: int) -> int | None:
    """The next of ``SIZES``; None beyond the last."""
    return next((size for size in SIZES if number <= size), None)


def padded_requests(num_requests: int) -> int:
    """The number of requests that a graph for so many is recorded with: 1, 2, 4, or a multiple of 8."""
    return next((size for size in (1, 2, 4) if num_requests <= size), -(-num_requests // 8) * 8)


def most_rows(num_rows: int) -> int:
    """Rows of the largest graph that does the work of ``num_rows`` sooner than launches do."""
    return min(SIZES[-1], max(FREE_ROWS, 2 * num_rows))


class ForwardSize(NamedTuple):
    """Key of a forward graph."""

    num_requests: int
    num_rows: int
    """The most of one request."""
    overwrites: bool
    """True if rows are written to pages before attention reads them there."""
    adds: bool
    """True if some rows are written to pages as well, and rows have limits."""


class ForwardGraph:
    """One recorded pass of up to so many requests, which attend to their pages and to their own rows.

    Rows lie at the front. Those behind them, which fill the graph up, are no request's: no attention reaches them.
    """

    def __init__(self, engine: "StepGraphs", size: ForwardSize) -> None:
        model, store, pages, max_pages = engine.model, engine.store, engine.pages, engine.max_pages
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
        self.replay = engine.record(self.launch)

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
            slots = pages.slots(page * pages.page_size + rows[: pages.page_size])
            self.row_slots.fill_(-1)[:, : pages.page_size] = slots
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


class FillingSize(NamedTuple):
    """Key of a graph that fills in tokens."""

    num_candidates: int
    width: int
    """Candidates and positions of one request."""
    choice: Choice
    guaranteed: bool
    """True if a request fills at least one candidate, whatever its rule says."""
    least: bool
    """True if a request has a minimum number of filled candidates."""


class FillingGraph:
    """The recorded filling in of up to so many candidates: the head, statistics of its logits, the choice, and the
    canvas. Candidates behind a batch's own, which fill the graph up, are no request's."""

    def __init__(self, engine: "StepGraphs", size: FillingSize) -> None:
        predictor, store, measure = engine.predictor, engine.store, size.choice.measure
        self.hidden = engine.pages.keys.new_zeros(size.num_candidates, engine.model.shape.hidden_size)
        device = self.hidden.device
        # What fills the graph up belongs to one more request.
        self.filler = torch.tensor([engine.max_requests, 0, 0, SPARE, 0], device=device)[:, None]
        self.table = self.filler.repeat(1, size.num_candidates)
        self.values = torch.zeros(engine.max_requests + 1, device=device)
        zeros = torch.zeros_like(self.values, dtype=torch.int64)
        self.guaranteed = zeros if size.guaranteed else None
        self.least = zeros.clone() if size.least else None
        self.holds: BatchCandidates | None = None
        self.held_values: tuple[list[float], list[int], list[int]] = [], [], []
        self.store, self.width = store, size.width
        requests, offsets, positions, places, self.rows = self.table.unbind()

        def fill() -> torch.Tensor:
            statistics = predictor.predict(self.hidden, GREEDY, None, measure == "entropy", measure == "margin")
            confidence = statistics.confidence(measure, offsets).masked_fill(~store.masked[places], -torch.inf)
            numbers = self.values, size.width, self.guaranteed, self.least
            chosen = select(size.choice.rule, confidence, requests, offsets, *numbers)
            store.fill(places, statistics.token, chosen)
            return filled_of(requests, positions, statistics, chosen)

        self.launch = fill
        self.replay = engine.record(fill)

    def fill_up(self) -> None:
        """Take in the numbers of a made-up batch. The store must be empty."""
        numbers = torch.arange(self.table.shape[1], device=self.table.device)
        requests, places = (numbers // self.width).clamp(max=self.values.shape[0] - 1), SPARE + 1 + numbers
        self.table.copy_(torch.stack((requests, numbers % self.width, numbers, places, numbers)))
        self.hidden.copy_(torch.sin(torch.arange(self.hidden.numel(), device=numbers.device)).view_as(self.hidden))
        self.values.fill_(0.5)
        for held in (self.guaranteed, self.least):
            if held is not None:
                held.fill_(1)
        self.store.masked[places] = True
        self.holds, self.held_values = None, ([], [], [])

    def __call__(
        self, hidden: torch.Tensor, group: BatchCandidates, values: list[float], guaranteed: list[int], least: list[int]
    ) -> Filled:
        """``values`` of the rule, ``guaranteed`` and ``least`` are as ``select`` wants them, for each request."""
        num_candidates = group.positions.numel()
        if self.holds is not group:
            self.table[:, :num_candidates] = group.table
            self.table[:, num_candidates:] = self.filler
            self.holds = group
        if self.held_values != (values, guaranteed, least):
            self.values[: len(values)] = on_device(values, hidden.device, self.values.dtype)
            for held, numbers in ((self.guaranteed, guaranteed), (self.least, least)):
                if held is not None:
                    held[: len(values)] = on_device(numbers, hidden.device)
            self.held_values = values, guaranteed, least
        torch.index_select(hidden, 0, self.rows, out=self.hidden)
        return self.replay()[:, :num_candidates].clone()


@dataclass
class StepGraphs:
    """The graphs of one engine, which run the parts of steps that they can."""

    model: DiffusionDecoder
    predictor: TokenPredictor
    store: CanvasStore
    pages: PageView
    max_pages: int
    """The most pages of a request in a layer."""
    max_requests: int
    """The most requests of a batch."""
    records: Callable[[DecodingSpec, StepPlan], bool]
    """Return True if a step of a request can be recorded."""
    record: Record
    forwards: GraphCache[ForwardSize, ForwardGraph] = field(init=False)
    fillings: GraphCache[FillingSize, FillingGraph] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.store.tokens
        self.forwards = GraphCache(lambda size: ForwardGraph(self, size))
        self.fillings = GraphCache(lambda size: FillingGraph(self, size))

    def _forget_outdated(self) -> None:
        """Graphs read and write the canvases where they were recorded."""
        if self.store.tokens is not self.tokens:
            self.__post_init__()

    def problem(self, max_error: float) -> str | None:
        """Difference between a graph and the same work launched, on made-up numbers; None: none.

        For an idle engine: it writes to the first page of the pool and to the canvases. ``max_error`` is that of hidden
        states, over the largest of them.
        """
        self.pages.keys[1].normal_()
        self.pages.values[1].normal_()
        for (num_requests, num_rows, *_), forward in self.forwards.graphs.items():
            forward.fill_up(page=1)
            launched = forward.launch().float()
            error = float((forward.replay().float() - launched).abs().max() / launched.abs().max())
            if not error <= max_error:
                return f"{num_requests} requests of {num_rows} rows are off by {error:.1e} when they are replayed"
        for size, filling in self.fillings.graphs.items():
            filling.fill_up()
            expected = filling.launch().clone()
            filling.fill_up()
            if not torch.equal(filling.replay(), expected):
                return f"{size.num_candidates} candidates are filled otherwise when that is replayed"
        return None

    def forward(self, batch: StepBatch, layer_pass: LayerPass) -> torch.Tensor | None:
        """Hidden states ``[num_rows, hidden_size]``, to be read before the next step; None: launch it."""
        if not (isinstance(layer_pass, PagedPass) and layer_pass.reads):
            return None
        if not all(self.records(canvas.spec, plan) for canvas, plan in zip(batch.canvases, batch.plans, strict=True)):
            return None
        sizes, writes, fresh = layer_pass.rows.sizes, layer_pass.row_slots is not None, layer_pass.attend_fresh
        num_requests, longest = padded_requests(len(sizes)), padded(max(sizes))
        if longest is None or num_requests * longest > most_rows(sum(sizes)):
            return None
        self._forget_outdated()
        size = ForwardSize(num_requests, longest, writes and not fresh, writes and fresh)
        return self.forwards[size](batch, layer_pass)

    def fill(self, hidden: torch.Tensor, group: BatchCandidates) -> Filled | None:
        """Tokens that the step fills in ``group``; None: launch it. ``hidden`` covers all rows of the batch."""
        choices, guaranteed, least = group.choices(), group.guaranteed(), group.least()
        num_candidates, width = padded(group.positions.numel()), padded(group.width)
        if len(choices) != 1 or num_candidates is None or width is None or not self._is_plain(group):
            return None
        (choice,) = choices
        if choice.measure == "noise" or num_candidates > most_rows(group.positions.numel()):
            return None
        self._forget_outdated()
        size = FillingSize(num_candidates, width, choice, any(guaranteed), any(least))
        values = [choices[choice].get(i, 0.0) for i in range(len(group.batch.plans))]
        return self.fillings[size](hidden, group, values, guaranteed, least)

    def _is_plain(self, group: BatchCandidates) -> bool:
        """Return True if requests with equal settings are greedy and ask for tokens only."""
        plans, specs = group.batch.plans, [group.batch.canvases[index].spec for index in group.members]
        first = group.batch.canvases[group.members[0]]
        return not (
            self.predictor.tp_group.world_size > 1
            or first.settings != GREEDY
            or first.constrained is not None
            or group.biased
            or any(spec.delay_eos or spec.needs_per_step_output or spec.certainty_sigma is not None for spec in specs)
            or any(plan.quota.observed is not None for plan in plans)
            or any(group.enough())
            or any(spec.alg_temp for spec in specs)
        )
