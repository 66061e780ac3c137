"""Pages that requests hold, and how many requests one pool admits, by cache method.

The pool is sized for eight requests of `dual`; a hundred requests are then queued with each method. Then the peak
memory of eight requests at once by retention ratio: their pages, and what the process takes beyond what it held before
they came, in a pool of just that many pages.

    python benchmarks/cache_memory.py [--canvas 1024] [--output FILE.json]
"""

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from random_engine import random_llada

from dllm_engine import DiffusionParams
from dllm_engine.bench.machine import machine
from dllm_engine.bench.memory import MIB, peak, restart_peak
from dllm_engine.bench.passes import runner_of
from dllm_engine.scheduler.page_layout import pages_for

PAGE_SIZE = 32
BLOCK_LENGTH = 32
GEN_LENGTH = 64
LAYERS = 2
HEADS, HEAD_DIM = 2, 32
NUM_REQUESTS = 100
RATIOS = (1.0, 0.75, 0.5, 0.25)
METHODS: list[tuple[str, dict[str, float]]] = [
    ("dual", {}),
    ("prefix", {}),
    *(("sparse", {"retention_ratio": ratio}) for ratio in RATIOS),
]
PEAK_LAYERS, PEAK_REQUESTS = 16, 8
"""Activations do not grow with the layers, pages do; many layers, as real models have."""


def measure(canvas: int, pool_bytes: int, cache_method: str, cache_options: dict[str, float]) -> dict[str, Any]:
    llm = random_llada(
        hidden_size=HEADS * HEAD_DIM,
        num_layers=LAYERS,
        num_heads=HEADS,
        vocab_size=512,
        max_model_len=canvas,
        dtype="float32",
        max_num_seqs=64,
        cache_method=cache_method,
        cache_options=cache_options,
        page_size=PAGE_SIZE,
        kv_cache_memory_bytes=pool_bytes,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pages = runner_of(llm).pages
    assert pages is not None
    page_bytes = 2 * pages.keys[0].numel() * pages.keys.element_size()
    params = DiffusionParams(gen_length=GEN_LENGTH, block_length=BLOCK_LENGTH, steps=8, ignore_eos=True)
    for i in range(NUM_REQUESTS):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": [1 + i] * (canvas - GEN_LENGTH)}, params)
    finished = most_running = most_pages_per_request = 0
    while llm.llm_engine.has_unfinished_requests():
        finished += sum(output.finished for output in llm.llm_engine.step())
        running = len(scheduler.running)
        most_running = max(most_running, running)
        if running:
            most_pages_per_request = max(most_pages_per_request, scheduler.pages.num_allocated // running)
    return {
        "method": cache_method,
        **cache_options,
        "bytes_per_request": most_pages_per_request * page_bytes,
        "page_bytes": page_bytes,
        "most_running": most_running,
        "finished": finished,
        "pages_left_behind": scheduler.pages.num_allocated,
    }


def measure_peak(canvas: int, ratio: float) -> dict[str, Any]:
    """Pages and memory of the process at the worst moment of ``PEAK_REQUESTS`` requests at once."""
    page_bytes = 2 * PAGE_SIZE * HEADS * HEAD_DIM * 4
    pages_of_request = PEAK_LAYERS * pages_for(int((canvas - BLOCK_LENGTH) * ratio), PAGE_SIZE)
    llm = random_llada(
        hidden_size=HEADS * HEAD_DIM,
        num_layers=PEAK_LAYERS,
        num_heads=HEADS,
        vocab_size=512,
        max_model_len=canvas,
        dtype="float32",
        max_num_seqs=PEAK_REQUESTS,
        cache_method="sparse",
        cache_options={"retention_ratio": ratio},
        page_size=PAGE_SIZE,
        kv_cache_memory_bytes=(PEAK_REQUESTS * pages_of_request + 1) * page_bytes,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    params = DiffusionParams(gen_length=GEN_LENGTH, block_length=BLOCK_LENGTH, steps=8, ignore_eos=True)
    for i in range(PEAK_REQUESTS):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": [1 + i] * (canvas - GEN_LENGTH)}, params)
    before = restart_peak()
    most_running = most_allocated = 0
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        most_running = max(most_running, len(scheduler.running))
        most_allocated = max(most_allocated, scheduler.pages.num_allocated)
    return {
        "retention_ratio": ratio,
        "running": most_running,
        "peak_page_bytes": most_allocated * page_bytes,
        "peak_process_bytes": peak() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--canvas", type=int, default=1024)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    page_bytes = 2 * PAGE_SIZE * HEADS * HEAD_DIM * 4
    dual_pages = LAYERS * pages_for(options.canvas - BLOCK_LENGTH, PAGE_SIZE)
    pool_bytes = (8 * dual_pages + 1) * page_bytes
    figures = [measure(options.canvas, pool_bytes, *method) for method in METHODS]
    per_layer = LAYERS * page_bytes
    print(
        f"canvas {options.canvas}, block {BLOCK_LENGTH}, pages of {PAGE_SIZE}, {LAYERS} layers; pool of 8 dual requests"
    )
    print(machine())
    print(f"{'method':>8} {'ratio':>6} {'KiB/request':>12} {'of dual':>8} {'running':>8} {'finished':>9}")
    for row in figures:
        share = row["bytes_per_request"] / figures[0]["bytes_per_request"]
        print(
            f"{row['method']:>8} {row.get('retention_ratio', ''):>6} {row['bytes_per_request'] / 1024:>12.0f} "
            f"{share:>8.2f} {row['most_running']:>8} {row['finished']:>9}"
        )
    print(f"one page per layer: {per_layer / 1024:.0f} KiB")
    # A process each: one keeps what its engines have freed, and the next one's pages would not show.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as alone:
        peaks = list(alone.map(measure_peak, [options.canvas] * len(RATIOS), RATIOS))
    print(f"\npeak of sparse, {PEAK_REQUESTS} requests at once, {PEAK_LAYERS} layers")
    print(f"{'ratio':>8} {'pages MiB':>10} {'process MiB':>12} {'running':>8}")
    for row in peaks:
        print(
            f"{row['retention_ratio']:>8} {row['peak_page_bytes'] / MIB:>10.1f} "
            f"{row['peak_process_bytes'] / MIB:>12.1f} {row['running']:>8}"
        )
    if options.output:
        options.output.write_text(
            json.dumps({"machine": machine(), "canvas": options.canvas, "figures": figures, "peaks": peaks}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
