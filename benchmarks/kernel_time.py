"""Time of a call of paged attention over what its bytes and its operations alone would take on the machine.

The floor of a call is the longer of two times: the bytes it must read and write over the bandwidth that a large copy
reaches here, and its multiplications and additions over the rate that a large matrix product reaches here. Both are
measured in the same run, taking turns with the calls.

    python benchmarks/kernel_time.py [--device cuda] [--dtype bfloat16] [--output FILE.json]

On a CPU one thread computes; on CUDA it is the time between events around a recorded graph.

With ``--tiles`` it looks for the fastest tiles of the kernel on this GPU instead, and writes the table that the kernel
reads. Tiles whose result is wrong, or that do not fit the GPU, are left out.

    python benchmarks/kernel_time.py --tiles tiles.json [--output FILE.json]
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from program import Rows, argument_parser, report, write
from timing import MachineRates, seconds_of

from dllm_engine.check.checks import compare
from dllm_engine.check.paged_case import paged_case
from dllm_engine.kernels.paged_attention import paged_attention
from dllm_engine.kernels.triton.tiles import TABLE_FILE, Tiles, capability_of, tiles_by_rule
from dllm_engine.text import json_rows, one_line

PAGE_SIZE = 32
HEAD_DIM = 128


@dataclass(frozen=True)
class Case:
    """Equal requests, each of ``rows`` that attend to ``retained`` tokens in pages and, if asked, to themselves."""

    name: str
    requests: int
    rows: int
    retained: int
    heads: int = 32
    kv_heads: int = 32
    packed: bool = False
    """Heads of different lengths, ``retained`` on average, as MaskKV keeps them; else token by token."""
    attend_fresh: bool = True

    @property
    def pairs(self) -> int:
        """(row, query head) pairs of a KV head, by which tiles are chosen."""
        return self.rows * self.heads // self.kv_heads


CASES = (
    Case("block of 32, 1k retained", 1, 32, 1024),
    Case("block of 32, 8k retained", 1, 32, 8192),
    Case("8 requests, 1k retained", 8, 32, 1024),
    Case("28 heads share 4, 4k retained", 1, 32, 4096, heads=28, kv_heads=4),
    Case("16 rows, heads of 320 on average", 1, 16, 320, packed=True, attend_fresh=False),
    Case("8 such requests", 8, 16, 320, packed=True, attend_fresh=False),
    Case("512 rows, 512 retained", 1, 512, 512),
)


def arguments(case: Case, device: str, dtype: torch.dtype, held: torch.dtype | None = None) -> dict[str, Any]:
    """Of ``paged_attention``; the pages of a request lie anywhere in the pool. ``held``: as ``paged_case`` has it."""
    lengths = [case.retained] * case.kv_heads
    if case.packed:
        draw, around = torch.Generator().manual_seed(0), (case.retained // 2, case.retained * 3 // 2 + 1)
        lengths = torch.randint(*around, (case.kv_heads,), generator=draw).tolist()
    requests = [case.rows] * case.requests, [lengths] * case.requests
    made = paged_case(*requests, case.heads, HEAD_DIM, PAGE_SIZE, case.packed, dtype, device=device, held=held)
    tokens = made.tokens._replace(max_head_len=max(lengths))
    return made._asdict() | {"tokens": tokens, "attend_fresh": case.attend_fresh, "max_seqlen": case.rows}


def costs(call: dict[str, Any]) -> tuple[int, int]:
    """Bytes and operations of a call: each retained key and value, row and result once."""
    q, k = call["q"], call["k"]
    head_len = call["tokens"].head_len
    num_requests, kv_heads = head_len.shape
    rows = q.shape[0] // num_requests
    retained = int(head_len.sum())
    fresh = k.numel() // HEAD_DIM if call["attend_fresh"] else 0
    numbers = 2 * q.numel() + 2 * (retained + fresh) * HEAD_DIM
    return numbers * q.element_size(), 4 * rows * (retained + fresh) * (q.shape[1] // kv_heads) * HEAD_DIM


def timer(case: Case, device: str, dtype: torch.dtype) -> Callable[[], float]:
    """A function that returns the seconds of one call."""
    if device == "cpu":
        call = arguments(case, device, dtype)
        return lambda: seconds_of(lambda: paged_attention(**call))
    return recorded(calls_beyond_cache(case, dtype))


def calls_beyond_cache(case: Case, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Calls with operands of their own, twice the L2 cache in all: those of a layer are not in the cache when its turn
    comes."""
    call = arguments(case, "cuda", dtype)
    cache_bytes = torch.cuda.get_device_properties(call["q"].device).L2_cache_size
    return [call, *(arguments(case, "cuda", dtype) for _ in range(2 * cache_bytes // costs(call)[0]))]


def recorded(calls: Sequence[dict[str, Any]]) -> Callable[[], float]:
    """A function that returns the seconds of one of the calls, on average.

    A graph of them runs between two events, because a launch takes longer than a small kernel.
    """
    for warm_up in calls:
        paged_attention(**warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            paged_attention(**call)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def seconds() -> float:
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / len(calls)

    return seconds


def find_tiles(options: argparse.Namespace) -> None:
    """Look for the fastest tiles for each number of pairs of ``CASES``.

    The table and the figures are written after each of them, because what follows may fail.
    """
    dtype = getattr(torch, options.dtype)
    of_this_gpu: dict[str, list[int]] = {}
    table = json.loads(TABLE_FILE.read_text(encoding="utf-8"))
    table.setdefault(capability_of(torch.device("cuda")), {})[str(HEAD_DIM)] = of_this_gpu
    figures: Rows = []
    for pairs in sorted({case.pairs for case in CASES}):
        rows = compare_tiles([case for case in CASES if case.pairs == pairs], dtype, options.rounds)
        figures += rows
        of_this_gpu[str(pairs)] = min(rows, key=lambda row: row.get("over_rule", math.inf))["tiles"]
        options.tiles.write_text(json_rows(table, depth=3) + "\n", encoding="utf-8")
        write(options, figures=figures)
    report(options, figures=figures)
    print(f"\nTo let the kernel use them: cp {options.tiles} kernels/triton/{TABLE_FILE.name}")


def compare_tiles(cases: Sequence[Case], dtype: torch.dtype, rounds: int) -> Rows:
    """A row for each choice of tiles for cases of as many pairs; timed in turns.

    Raises ``ValueError`` if the rule's tiles are left out: the kernel would be wrong without a table.
    """
    from dllm_engine.kernels.triton import paged_attention as of_gpu

    calls = {case: calls_beyond_cache(case, dtype) for case in cases}
    expected = {case: expected_result(case, dtype) for case in cases}
    choices = candidates(cases[0].pairs, dtype)
    rows: Rows = []
    timers: dict[Tiles, list[Callable[[], float]]] = {}
    for tiles in choices:
        row = {"pairs": cases[0].pairs, "tiles": list(tiles)}
        rows.append(row)
        try:
            with mock.patch.object(of_gpu, "choose_tiles", lambda *of_call, tiles=tiles: tiles):
                row["error"] = max(error_of(calls[case][0], expected[case]) for case in cases)
                timers[tiles] = [recorded(calls[case]) for case in cases]
        except Exception as raised:
            if tiles == choices[0]:
                raise
            row["left_out"] = f"{type(raised).__name__}: {one_line(raised)}"
    times: dict[Tiles, list[list[float]]] = {tiles: [[] for _ in cases] for tiles in timers}
    for number in range(rounds + 2):
        for tiles, of_cases in timers.items():
            for made, measure in zip(times[tiles], of_cases, strict=True):
                seconds = measure()
                if number >= 2:  # the first calls warm up
                    made.append(seconds)
    medians = {tiles: [statistics.median(made) for made in of_cases] for tiles, of_cases in times.items()}
    for row in rows:
        if of_tiles := medians.get(Tiles(*row["tiles"])):
            ratios = [seconds / of_rule for seconds, of_rule in zip(of_tiles, medians[choices[0]], strict=True)]
            row |= {"over_rule": statistics.geometric_mean(ratios), "ms": [1e3 * seconds for seconds in of_tiles]}
    return rows


def candidates(pairs: int, dtype: torch.dtype) -> list[Tiles]:
    """Tiles worth a try; first those of the rule."""
    rule = tiles_by_rule(pairs, HEAD_DIM, dtype)
    tried = [
        Tiles(block_q, block_k, num_warps, num_stages)
        for block_q in {rule.block_q, max(16, rule.block_q // 2)}
        for num_warps in ((4, 8) if block_q >= 64 else (4,))
        for block_k, num_stages in product((32, 64), (2, 3, 4))
    ]
    return list(dict.fromkeys([rule, *tried]))


def expected_result(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """The plain version's, from the same numbers, in float32."""
    return paged_attention(**arguments(case, "cpu", dtype, held=torch.float32))


def error_of(call: dict[str, Any], expected: torch.Tensor) -> float:
    """Of a call's result; raises ``ValueError`` where rounding does not explain it."""
    error, bound = compare([paged_attention(**call)], [expected])
    if not error <= bound:
        raise ValueError(f"the error is {error:.1e}, beyond {bound:.1e}")
    return error


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on CUDA")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiles", type=Path, metavar="FILE", help="write the fastest tiles for this GPU to it")
    options = parser.parse_args()
    device = options.device
    options.dtype = options.dtype or ("bfloat16" if device == "cuda" else "float32")
    dtype = getattr(torch, options.dtype)
    if options.tiles:
        if device == "cpu" or dtype.itemsize != 2:
            parser.error(f"--tiles needs a GPU and float16 or bfloat16, here {device} and {options.dtype}")
        find_tiles(options)
        return
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
        floor = max(num_bytes / rates.copy_bytes_per_second, num_flops / rates.product_flops_per_second)
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
    report(options, head_dim=HEAD_DIM, page_size=PAGE_SIZE, rates=rates.to_json(), figures=figures)


if __name__ == "__main__":
    main()
