"""Recording of work on a GPU, and the sizes of recorded work."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import GraphCaptureContext

MAX_GRAPHS = 128
"""Limit on the graphs of each kind. The least recently replayed graph is dropped first.
"""
MAX_COUNTED = 1024
"""Limit on the keys whose launches are counted: each temperature makes new keys."""
SIZES = (4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of rows that graphs are recorded for, beside multiples of the last."""
MAX_ROWS = 4096
"""The most rows of a graph."""
HOST_BOUND_ROWS = 1024
"""Rows that a GPU computes in about the time that launching a pass takes."""
LAUNCHES_BEFORE = 2
"""Number of launches of equal work before it is recorded, if warm-up has not recorded
it.
"""
Run = Callable[[], Any]
Record = Callable[..., Run]
"""``record(run, launch_first=True)`` returns a function that repeats the work of
``run`` on the same tensors and into the same result. With ``launch_first`` the work is
launched once before: this compiles kernels and allocates workspaces, which must not
happen while recording."""
_Key = TypeVar("_Key", bound=Hashable)
_Graph = TypeVar("_Graph")


class GraphRecorder:
    """``Record`` for a GPU. Its graphs share one memory pool and one stream, so that
    only one of them runs at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.context = GraphCaptureContext(torch.cuda.Stream(device))
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run, *, launch_first: bool = True) -> Run:
        graph = torch.cuda.CUDAGraph()
        # vLLM's context, because all-reduces of tensor parallelism must know about the
        # capture.
        with get_tp_group().graph_capture(self.context):
            if launch_first:
                run()
            with torch.cuda.graph(
                graph, self.pool, self.context.stream, capture_error_mode="thread_local"
            ):
                result = run()

        def replay() -> Any:
            graph.replay()
            return result

        return replay


class GraphCache(Generic[_Key, _Graph]):
    """Cache of graphs, by their keys."""

    def __init__(self, make: Callable[..., _Graph]) -> None:
        """``make``: makes a graph from a key and the further arguments of ``get``."""
        self.make = make
        self.graphs: OrderedDict[_Key, _Graph] = OrderedDict()
        self.num_launched: Counter[_Key] = Counter()

    def get(self, key: _Key, after: int = 0, *given: Any) -> _Graph | None:
        """Graph of a key; None: launch the step. A graph is made once it has been
        requested more than ``after`` times.
        """
        if key not in self.graphs:
            if len(self.num_launched) == MAX_COUNTED:
                self.num_launched.clear()
            self.num_launched[key] += 1
            if self.num_launched[key] <= after:
                return None
            if len(self.graphs) == MAX_GRAPHS:
                self.graphs.popitem(last=False)
            del self.num_launched[key]
            self.graphs[key] = self.make(key, *given)
        self.graphs.move_to_end(key)
        return self.graphs[key]


def padded(number: int) -> int | None:
    """Round up to one of ``SIZES``, or to a multiple of the last one; None beyond
    ``MAX_ROWS``.
    """
    if number > SIZES[-1]:
        number = -(-number // SIZES[-1]) * SIZES[-1]
        return number if number <= MAX_ROWS else None
    return next(size for size in SIZES if number <= size)


def most_padding(num_rows: int) -> int:
    """The most padding rows of a graph of ``num_rows``, which is a result of
    ``padded``.
    """
    return (
        num_rows
        - 1
        - max(size for size in (0, *SIZES, num_rows - SIZES[-1]) if size < num_rows)
    )


def padded_requests(num_requests: int) -> int:
    """Round up to the number of requests of a recorded graph: 1, 2, 4, or a multiple of
    8.
    """
    return next(
        (size for size in (1, 2, 4) if num_requests <= size), -(-num_requests // 8) * 8
    )


def worth_padding(num_rows: int, padded_rows: int) -> bool:
    """Return True if a graph of ``padded_rows`` is faster than launching the work of
    ``num_rows``.
    """
    return padded_rows <= max(HOST_BOUND_ROWS, num_rows + num_rows // 16)
