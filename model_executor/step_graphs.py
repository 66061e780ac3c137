"""Forward passes recorded as CUDA graphs: one launch for the hundreds of kernels of a REUSE step.

A REUSE step computes few rows, so a GPU is done with each kernel sooner than the host can launch the next. Where every
request of a batch computes equally many rows (a block each), what one pass does differs from another's in the contents
of five tensors alone: a graph is recorded over such tensors for each number of rows and rounded number of requests
when it is first needed, and replayed over what later batches put into them.
"""

from collections import OrderedDict
from collections.abc import Callable

import torch
from vllm.distributed.parallel_state import graph_capture

from dllm_engine.model_executor.batch_tables import KVTables
from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.page_memory import PageView
from dllm_engine.model_executor.passes.base import LayerPass
from dllm_engine.model_executor.passes.paged import PagedPass, RetentionPass
from dllm_engine.model_executor.step_batch import SplitRows, StepBatch

MAX_ROWS = 1024
"""Rows of a pass from which on a GPU is busy for longer than launching takes."""
MAX_GRAPHS = 64
"""Graphs kept; the least recently replayed one goes first."""

Recorder = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
"""From a function of tensors that stay where they are to one that does the same work again, into the same result."""


class CudaRecorder:
    """Records CUDA graphs that share one memory pool: no two of them run at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # vLLM's context: the all-reduces of tensor parallelism have to know.
        with graph_capture(self.device) as context:
            run()  # compiles kernels and allocates workspaces, which must not happen while recording
            with torch.cuda.graph(graph, self.pool, context.stream, capture_error_mode="thread_local"):
                result = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


def padded_requests(num_requests: int) -> int:
    """The number of requests that a graph for so many is recorded with: 1, 2, 4, or a multiple of 8."""
    return next((size for size in (1, 2, 4) if num_requests <= size), -(-num_requests // 8) * 8)


class StepGraph:
    """One recorded pass of some requests of equally many rows."""

    def __init__(
        self,
        model: DiffusionDecoder,
        pages: PageView,
        size: tuple[int, int],
        max_pages: int,
        record: Recorder,
    ) -> None:
        """``size``: number of requests, and rows of each. ``max_pages``: the most pages of a request in a layer."""
        (num_requests, num_rows), device = size, pages.keys.device
        self.input_ids = torch.zeros(num_requests * num_rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.input_ids)
        shape = (model.shape.num_layers, num_requests, max_pages)
        self.tokens = KVTables(
            pages,
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(num_requests, dtype=torch.int32, device=device),
            max_pages * pages.page_size,
        )
        layer_pass = PagedPass(self.tokens, SplitRows([num_rows] * num_requests, [False] * num_requests, device))
        input_ids, positions = self.input_ids, self.positions
        self.replay = record(lambda: model(input_ids, positions, layer_pass))

    def __call__(self, batch: StepBatch, tokens: KVTables) -> torch.Tensor:
        """Hidden states ``[num_rows of the batch, hidden_size]``, until the next replay of any graph."""
        rows, requests = batch.input_ids.shape[0], len(batch.plans)
        self.input_ids[:rows] = batch.input_ids
        self.positions[:rows] = batch.positions
        self.tokens.tables[:, :requests, : tokens.tables.shape[2]] = tokens.tables
        self.tokens.head_len[:requests] = tokens.head_len
        # Requests that are not there attend to their own rows alone: pages that they had may be another's by now.
        self.tokens.head_len[requests:] = 0
        return self.replay()[:rows]


class StepGraphs:
    """Runs forward passes of one engine, from graphs where it can; they are recorded as they are needed."""

    def __init__(self, model: DiffusionDecoder, pages: PageView, max_pages: int, record: Recorder) -> None:
        """``max_pages``: the most pages of a request in a layer."""
        self.model, self.pages, self.max_pages, self.record = model, pages, max_pages, record
        self.graphs: OrderedDict[tuple[int, int], StepGraph] = OrderedDict()

    def __call__(self, batch: StepBatch, layer_pass: LayerPass) -> torch.Tensor:
        """Hidden states ``[num_rows, hidden_size]``, to be read before the next pass."""
        num_requests, num_rows = padded_requests(len(batch.plans)), batch.num_rows(0)
        alike = all(batch.num_rows(i) == num_rows for i in range(len(batch.plans)))
        fits = alike and num_requests * num_rows <= MAX_ROWS
        if fits and isinstance(layer_pass, RetentionPass) and layer_pass.repeats and layer_pass.reads:
            return self._graph((num_requests, num_rows))(batch, layer_pass.tokens)
        return self.model(batch.input_ids, batch.positions, layer_pass)

    def _graph(self, size: tuple[int, int]) -> StepGraph:
        if size not in self.graphs:
            if len(self.graphs) == MAX_GRAPHS:
                self.graphs.popitem(last=False)
            self.graphs[size] = StepGraph(self.model, self.pages, size, self.max_pages, self.record)
        self.graphs.move_to_end(size)
        return self.graphs[size]
