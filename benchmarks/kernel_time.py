"""Time of a call of paged attention over what its bytes and its operations alone would
take on the machine.

The floor of a call is the longer of two times: the bytes it must read and write over
the bandwidth that a large copy reaches here, and its multiplications and additions over
the rate that a large matrix product reaches here. Both are measured in the same run,
taking turns with the calls.

    python benchmarks/kernel_time.py [--device cuda] [--dtype bfloat16] [--output
    FILE.json]

On a CPU one thread computes; on CUDA it is the time between events around a recorded
graph.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from program import argument_parser, report
from timing import seconds_of

from dllm_engine.check.cases import Draw, Sizes, paged_case
from dllm_engine.kernels.paged_attention import paged_attention

PAGE_SIZE = 32
HEAD_DIM = 128
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 31}
PRODUCT_SIDE = {"cpu": 1024, "cuda": 8192}
NUM_WARMUP = 2


@dataclass(frozen=True)
class Case:
    """Equal requests, each of ``rows`` that attend to ``retained`` tokens in pages and,
    if asked, to themselves.
    """

    name: str
    requests: int
    rows: int
    retained: int
    heads: int = 32
    kv_heads: int = 32
    packed: bool = False
    """Heads of different lengths, ``retained`` on average, as MaskKV keeps them; else
    token by token.
    """
    attend_fresh: bool = True


CASES = (
    Case("block of 32, 1k retained", 1, 32, 1024),
    Case("block of 32, 8k retained", 1, 32, 8192),
    Case("8 requests, 1k retained", 8, 32, 1024),
    Case("28 heads share 4, 4k retained", 1, 32, 4096, heads=28, kv_heads=4),
    Case(
        "16 rows, heads of 320 on average", 1, 16, 320, packed=True, attend_fresh=False
    ),
    Case("8 such requests", 8, 16, 320, packed=True, attend_fresh=False),
    Case("512 rows, 512 retained", 1, 512, 512),
)


def arguments(case: Case, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of ``paged_attention``; the pages of a request lie anywhere in the
    pool.
    """
    lengths = [case.retained] * case.kv_heads
    if case.packed:
        generator = torch.Generator().manual_seed(0)
        around = case.retained // 2, case.retained * 3 // 2 + 1
        lengths = torch.randint(*around, (case.kv_heads,), generator=generator).tolist()
    sizes = Sizes(case.heads, case.kv_heads, HEAD_DIM, 0, 0, PAGE_SIZE)
    q, k, v, cu_seqlens, tokens = paged_case(
        Draw(sizes, dtype, dtype, device),
        [case.rows] * case.requests,
        [lengths] * case.requests,
        case.packed,
    )
    call = {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens, "tokens": tokens}
    return call | {"attend_fresh": case.attend_fresh, "max_seqlen": case.rows}


def costs(call: dict[str, Any]) -> tuple[int, int]:
    """Bytes and operations of a call: each retained key and value, row
    and result once.
    """
    q, k = call["q"], call["k"]
    head_len = call["tokens"].head_len
    num_requests, kv_heads = head_len.shape
    rows = q.shape[0] // num_requests
    fresh = k.numel() // HEAD_DIM if call["attend_fresh"] else 0
    keys = int(head_len.sum()) + fresh
    num_bytes = 2 * (q.numel() + keys * HEAD_DIM) * q.element_size()
    queries_per_key = rows * q.shape[1] // kv_heads
    return num_bytes, 4 * keys * queries_per_key * HEAD_DIM


def timer(case: Case, device: str, dtype: torch.dtype) -> Callable[[], float]:
    """A function that returns the seconds of one call."""
    if device == "cpu":
        call = arguments(case, device, dtype)
        return lambda: seconds_of(lambda: paged_attention(**call))
    return recorded(calls_beyond_cache(case, dtype))


def calls_beyond_cache(case: Case, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Calls with operands of their own, twice the L2 cache in all: those of a layer are
    not in the cache when its turn comes."""
    calls = [arguments(case, "cuda", dtype)]
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    for _ in range(2 * cache_bytes // costs(calls[0])[0]):
        calls.append(arguments(case, "cuda", dtype))
    return calls


def recorded(calls: Sequence[dict[str, Any]]) -> Callable[[], float]:
    """A function that returns the seconds of one of the calls, on average.

    A graph of them runs between two events, because a launch takes longer than a small
    kernel.
    """
    for warm_up in calls:
        paged_attention(**warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            paged_attention(**call)
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)

    def seconds() -> float:
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / len(calls)

    return seconds


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
    )
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on CUDA")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    device = options.device
    options.dtype = options.dtype or ("bfloat16" if device == "cuda" else "float32")
    dtype = getattr(torch, options.dtype)
    if device == "cpu":
        torch.set_num_threads(1)
    timers: dict[Case | str, Callable[[], float]] = {
        case: timer(case, device, dtype) for case in CASES
    }
    source = torch.ones(COPY_BYTES[device] // dtype.itemsize, device=device).to(dtype)
    target = torch.empty_like(source)
    square = torch.randn(PRODUCT_SIDE[device], PRODUCT_SIDE[device], device=device)
    square = square.to(dtype)
    timers["copy"] = lambda: seconds_of(lambda: target.copy_(source))
    timers["product"] = lambda: seconds_of(lambda: square @ square)
    times: dict[Case | str, list[float]] = defaultdict(list)
    for number in range(NUM_WARMUP + options.rounds):
        for name, measure in timers.items():
            seconds = measure()
            if number >= NUM_WARMUP:
                times[name].append(seconds)
    rates = {
        "copy_bytes_per_second": 2 * source.nbytes / statistics.median(times["copy"]),
        "product_flops_per_second": 2
        * PRODUCT_SIDE[device] ** 3
        / statistics.median(times["product"]),
    }
    figures = []
    for case in CASES:
        num_bytes, num_flops = costs(arguments(case, "cpu", dtype))
        floor = max(
            num_bytes / rates["copy_bytes_per_second"],
            num_flops / rates["product_flops_per_second"],
        )
        seconds = statistics.median(times[case])
        figures.append(
            asdict(case)
            | {
                "ms": 1e3 * seconds,
                "lowest_ms": 1e3 * min(times[case]),
                "highest_ms": 1e3 * max(times[case]),
                "bytes": num_bytes,
                "flops": num_flops,
                "floor_ms": 1e3 * floor,
                "floor_over_time": floor / seconds,
            }
        )
    report(options, figures, head_dim=HEAD_DIM, page_size=PAGE_SIZE, rates=rates)


if __name__ == "__main__":
    main()
