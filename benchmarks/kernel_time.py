"""Time of a call of paged attention over what its bytes and its operations alone would take on the machine.

The floor of a call is the longer of two times: the bytes it must read and write over the bandwidth that a large copy
reaches here, and its multiplications and additions over the rate that a large matrix product reaches here. Both are
measured in the same run, taking turns with the calls.

    python benchmarks/kernel_time.py [--device cuda] [--dtype bfloat16] [--output FILE.json]

On a CPU one thread computes and processor seconds are counted; on CUDA the time between events.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from dllm_engine.bench.machine import machine
from dllm_engine.kernels.paged_attention import paged_attention
from dllm_engine.kernels.paged_tokens import PagedTokens
from dllm_engine.scheduler.page_layout import pages_for

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


CASES = (
    Case("block of 32, 1k retained", 1, 32, 1024),
    Case("block of 32, 8k retained", 1, 32, 8192),
    Case("8 requests, 1k retained", 8, 32, 1024),
    Case("28 heads share 4, 4k retained", 1, 32, 4096, heads=28, kv_heads=4),
    Case("16 rows, heads of 320 on average", 1, 16, 320, packed=True, attend_fresh=False),
    Case("8 such requests", 8, 16, 320, packed=True, attend_fresh=False),
    Case("512 rows, 512 retained", 1, 512, 512),
)


def arguments(case: Case, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Of ``paged_attention``; the pages of a request lie anywhere in the pool."""
    draw = torch.Generator().manual_seed(0)
    if case.packed:
        lengths = torch.randint(case.retained // 2, case.retained * 3 // 2 + 1, (case.kv_heads,), generator=draw)
    else:
        lengths = torch.full((case.kv_heads,), case.retained)
    slots_per_page = PAGE_SIZE * case.kv_heads
    per_request = pages_for(int(lengths.sum()), slots_per_page)
    pages = torch.randn(case.requests * per_request + 1, 2, slots_per_page, HEAD_DIM, generator=draw)
    pages = pages.to(device, dtype)
    tables = 1 + torch.randperm(case.requests * per_request, generator=draw).view(case.requests, per_request)
    starts = lengths.cumsum(0) - lengths if case.packed else torch.arange(case.kv_heads)
    num_rows = case.requests * case.rows

    def heads(count: int) -> torch.Tensor:
        return torch.randn(num_rows, count, HEAD_DIM, generator=draw).to(device, dtype)

    def per_head(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.int32).expand(case.requests, case.kv_heads).contiguous().to(device)

    bounds = list(accumulate([case.rows] * case.requests, initial=0))
    return {
        "q": heads(case.heads),
        "k": heads(case.kv_heads),
        "v": heads(case.kv_heads),
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=device),
        "tokens": PagedTokens(
            k_pages=pages[:, 0],
            v_pages=pages[:, 1],
            page_tables=tables.to(torch.int32).to(device),
            head_start=per_head(starts),
            token_stride=torch.full((case.requests,), 1 if case.packed else case.kv_heads).to(device, torch.int32),
            head_len=per_head(lengths),
            max_head_len=int(lengths.max()),
        ),
        "attend_fresh": case.attend_fresh,
        "max_seqlen": case.rows,
    }


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


def seconds_of(work: Callable[[], object], device: str) -> float:
    if device != "cuda":
        start = time.process_time()
        work()
        return time.process_time() - start
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on CUDA")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    device = options.device
    dtype = getattr(torch, options.dtype or ("bfloat16" if device == "cuda" else "float32"))
    if device == "cpu":
        torch.set_num_threads(1)
    calls = {case: arguments(case, device, dtype) for case in CASES}
    source = torch.ones((1 << 31 if device == "cuda" else 1 << 28) // dtype.itemsize, device=device, dtype=dtype)
    target = torch.empty_like(source)
    side = 8192 if device == "cuda" else 1024
    square = torch.randn(side, side, device=device).to(dtype)
    works: dict[Any, Callable[[], object]] = {case: lambda c=call: paged_attention(**c) for case, call in calls.items()}
    works |= {"copy": lambda: target.copy_(source), "product": lambda: square @ square}
    times: dict[Any, list[float]] = {key: [] for key in works}
    for number in range(options.rounds + 2):
        for key, work in works.items():
            seconds = seconds_of(work, device)
            if number >= 2:  # the first calls warm up
                times[key].append(seconds)
    medians = {key: statistics.median(seconds) for key, seconds in times.items()}
    bandwidth = 2 * source.numel() * source.element_size() / medians["copy"]
    rate = 2 * side**3 / medians["product"]
    where = torch.cuda.get_device_name() if device == "cuda" else machine()
    print(f"{where}; {dtype}, head_dim {HEAD_DIM}, pages of {PAGE_SIZE}; medians of {options.rounds}")
    print(f"copy {bandwidth / 1e9:.1f} GB/s, product of {side}: {rate / 1e12:.3f} TFLOP/s")
    print(f"{'':>33} {'ms':>9} {'bytes ms':>9} {'FLOPs ms':>9} {'floor/time':>11}")
    figures = []
    for case, call in calls.items():
        num_bytes, num_flops = costs(call)
        floor = max(num_bytes / bandwidth, num_flops / rate)
        row = asdict(case) | {
            "seconds": medians[case],
            "bytes": num_bytes,
            "flops": num_flops,
            "floor_seconds": floor,
            "floor_over_time": floor / medians[case],
        }
        figures.append(row)
        print(
            f"{case.name:>33} {1e3 * medians[case]:>9.3f} {1e3 * num_bytes / bandwidth:>9.3f} "
            f"{1e3 * num_flops / rate:>9.3f} {row['floor_over_time']:>11.2f}"
        )
    if options.output:
        report = {
            "machine": where,
            "dtype": str(dtype).removeprefix("torch."),
            "rounds": options.rounds,
            "head_dim": HEAD_DIM,
            "page_size": PAGE_SIZE,
            "copy_bytes_per_second": bandwidth,
            "product_flops_per_second": rate,
            "figures": figures,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
