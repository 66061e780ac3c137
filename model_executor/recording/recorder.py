"""Recording on a device, and what is recorded."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import ClassVar, Generic, TypeVar

import torch
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import GraphCaptureContext

MAX_GRAPHS = 64
"""Graphs kept of each kind; the least recently replayed one goes first."""
SIZES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of rows that graphs are recorded for. From the last on a GPU is busy for longer than launching takes."""
FREE_ROWS = 256
"""Rows that a GPU computes about as fast as one: reading the weights takes longer."""

_Key = TypeVar("_Key", bound=Hashable)
_Graph = TypeVar("_Graph")


class Recorder(ABC):
    """Records what a device does."""

    pads: ClassVar[bool]
    """Whether the device computes ``FREE_ROWS`` as fast as one, so that a graph may be larger than a step."""
    outlives_weights: ClassVar[bool]
    """Whether a graph uses the weights that are read into the model after it was recorded."""

    @abstractmethod
    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """From a function of tensors that stay where they are to one that does the same work again, into the same
        result."""


class CudaRecorder(Recorder):
    """Records CUDA graphs that share one memory pool and one stream: no two of them run at a time."""

    pads, outlives_weights = True, True

    def __init__(self, device: torch.device) -> None:
        self.context = GraphCaptureContext(torch.cuda.Stream(device))
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
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


class Recordings(Generic[_Key, _Graph]):
    """Graphs by their sizes, recorded when they are first needed."""

    def __init__(self, record: Callable[[_Key], _Graph]) -> None:
        self.record = record
        self.graphs: OrderedDict[_Key, _Graph] = OrderedDict()

    def __getitem__(self, key: _Key) -> _Graph:
        if key not in self.graphs:
            if len(self.graphs) == MAX_GRAPHS:
                self.graphs.popitem(last=False)
            self.graphs[key] = self.record(key)
        self.graphs.move_to_end(key)
        return self.graphs[key]


def padded(number: int) -> int | None:
    """The next of ``SIZES``; None beyond the last."""
    return next((size for size in SIZES if number <= size), None)


def padded_requests(num_requests: int) -> int:
    """The number of requests that a graph for so many is recorded with: 1, 2, 4, or a multiple of 8."""
    return next((size for size in (1, 2, 4) if num_requests <= size), -(-num_requests // 8) * 8)


def most_rows(num_rows: int, pads: bool) -> int:
    """Rows of the largest graph that does the work of ``num_rows`` sooner than operators called one by one; ``pads`` as
    in ``Recorder``."""
    return min(SIZES[-1], max(FREE_ROWS, 2 * num_rows) if pads else max(SIZES[0], num_rows))
