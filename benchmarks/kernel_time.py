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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from program import argument_parser, report
from timing import MachineRates, seconds_of

from dllm_engine.check.cases import Draw, Sizes, paged_case
from dllm_engine.kernels.paged_attention import paged_attention

PAGE_SIZE = 32
HEAD_DIM = 128


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
        draw, around = (
            torch.Generator().manual_seed(0),
            (case.retained // 2, case.retained * 3 // 2 + 1),
        )
        lengths = torch.randint(*around, (case.kv_heads,), generator=draw).tolist()
    sizes = Sizes(
        case.heads,
        case.kv_heads,
        HEAD_DIM,
        hidden_size=0,
        vocab_size=0,
        page_size=PAGE_SIZE,
    )
    drawn, rows = Draw(sizes, dtype, dtype, device), [case.rows] * case.requests
    q, k, v, cu_seqlens, tokens = paged_case(
        drawn, rows, [lengths] * case.requests, case.packed
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
    retained = int(head_len.sum())
    fresh = k.numel() // HEAD_DIM if call["attend_fresh"] else 0
    numbers = 2 * q.numel() + 2 * (retained + fresh) * HEAD_DIM
    return numbers * q.element_size(), 4 * rows * (retained + fresh) * (
        q.shape[1] // kv_heads
    ) * HEAD_DIM


def timer(case: Case, device: str, dtype: torch.dtype) -> Callable[[], float]:
    """A function that returns the seconds of one call."""
    if device == "cpu":
        call = arguments(case, device, dtype)
        return lambda: seconds_of(lambda: paged_attention(**call))
    return recorded(calls_beyond_cache(case, dtype))


def calls_beyond_cache(case: Case, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Calls with operands of their own, twice the L2 cache in all: those of a layer are
    not in the cache when its turn comes."""
    call = arguments(case, "cuda", dtype)
    cache_bytes = torch.cuda.get_device_properties(call["q"].device).L2_cache_size
    return [
        call,
        *(
            arguments(case, "cuda", dtype)
            for _ in range(2 * cache_bytes // costs(call)[0])
        ),
    ]


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
    first, last = (
        torch.cuda.Event(enable_timing=True),
        torch.cuda.Event(enable_timing=True),
    )

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
    timers = {case: timer(case, device, dtype) for case in CASES}
    rates = MachineRates(torch.device(device), dtype)
    times: dict[Case, list[float]] = {case: [] for case in CASES}
    for number in range(options.rounds + 2):
        rates.measure()
        for case, measure in timers.items():
            seconds = measure()
            if number >= 2:  # the first calls warm up
                times[case].append(seconds)
    figures = []
    for case in CASES:
        num_bytes, num_flops = costs(arguments(case, "cpu", dtype))
        floor = max(
            num_bytes / rates.copy_bytes_per_second,
            num_flops / rates.product_flops_per_second,
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
    report(
        options, figures, head_dim=HEAD_DIM, page_size=PAGE_SIZE, rates=rates.to_json()
    )


if __name__ == "__main__":
    main()
