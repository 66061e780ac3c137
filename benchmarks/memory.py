"""Memory of the cache methods: pages that requests hold, how many requests one pool runs, and the peak of a step.

The pool is sized for eight requests of `dual`; forty requests are then queued with each method, on a small model. The
peak is that of a whole-canvas step with a large vocabulary (on a CPU the process's high-water mark, less what it held
before), beside what logits of the whole canvas would take.

    python benchmarks/memory.py [--canvas 512 1024 2048] [--output FILE.json]
"""

import argparse
from typing import Any

from program import Rows, add_model_arguments, argument_parser, finish_requests, parse, report, start_engine

from dllm_engine import LLM, DiffusionParams
from dllm_engine.bench.memory import peak, restart_peak
from dllm_engine.bench.passes import runner_of, scheduler_of
from dllm_engine.scheduler.page_layout import pages_for

PAGE_SIZE, BLOCK_LENGTH = 32, 32
NUM_REQUESTS = 40
SMALL = {"hidden_size": 64, "heads": 2, "vocab_size": 512, "dtype": "float32"}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("dual", {}),
    ("prefix", {}),
    *(("sparse", {"retention_ratio": ratio}) for ratio in (1.0, 0.75, 0.5, 0.25)),
    *((name, {"exclude_prompt_states": excluded}) for name in ("dllm_cache", "maskkv") for excluded in (False, True)),
]


def add_requests(llm: LLM, count: int, canvas: int, gen_length: int) -> list[str]:
    params = DiffusionParams(gen_length=gen_length, block_length=BLOCK_LENGTH, steps=8, ignore_eos=True)
    for i in range(count):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": [1 + i] * (canvas - gen_length)}, params)
    return [str(i) for i in range(count)]


def pages_of_requests(options: argparse.Namespace, canvas: int, method: str, cache_options: dict[str, Any]) -> dict:
    """Answer a queue of requests with a pool for eight requests of ``dual``."""
    head_size = options.hidden_size // options.heads
    page_bytes = 2 * PAGE_SIZE * options.heads * head_size * 4
    dual_pages = options.layers * pages_for(canvas - BLOCK_LENGTH, PAGE_SIZE)
    llm = start_engine(
        options,
        canvas,
        NUM_REQUESTS,
        cache_method=method,
        cache_options=cache_options,
        page_size=PAGE_SIZE,
        kv_cache_memory_bytes=(8 * dual_pages + 1) * page_bytes,
    )
    scheduler, pages = scheduler_of(llm), runner_of(llm).pages
    assert pages is not None
    add_requests(llm, NUM_REQUESTS, canvas, options.gen_length)
    finished = most_running = allocated = reserved = 0
    while llm.llm_engine.has_unfinished_requests():
        finished += sum(output.finished for output in llm.llm_engine.step())
        if running := len(scheduler.running):
            most_running = max(most_running, running)
            allocated = max(allocated, scheduler.pages.num_allocated // running)
            reserved = max(reserved, scheduler.pages.num_reserved // running)
    bytes_of_page = pages.memory[0].numel() * pages.memory.element_size()
    return {
        "method": method,
        "cache_options": cache_options,
        "canvas": canvas,
        "kib_reserved_per_request": reserved * bytes_of_page / 1024,
        "kib_held_per_request": allocated * bytes_of_page / 1024,
        "most_running": most_running,
        "finished": finished,
        "pages_left_behind": scheduler.pages.num_allocated,
    }


def peak_of_step(llm: LLM, canvas: int, gen_length: int) -> int:
    """Bytes that one step holds at most beyond what was held before it."""
    request_ids = add_requests(llm, 1, canvas, gen_length)
    llm.llm_engine.step()
    before = restart_peak()
    llm.llm_engine.step()
    taken = peak() - before
    finish_requests(llm, request_ids)
    return taken


def main() -> None:
    parser = argument_parser(__doc__)
    add_model_arguments(parser, hidden_size=256, layers=2, heads=8, vocab_size=126_464)
    parser.add_argument("--canvas", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--pages-canvas", type=int, default=1024)
    parser.add_argument("--gen-length", type=int, default=64)
    options = parse(parser)
    llm = start_engine(options, max(options.canvas), 1)
    peaks: Rows = [
        {
            "canvas": canvas,
            "peak_mib": peak_of_step(llm, canvas, options.gen_length) / (1 << 20),
            "logits_of_canvas_mib": canvas * options.vocab_size * 4 / (1 << 20),
        }
        for canvas in options.canvas
    ]
    small = argparse.Namespace(**vars(options) | SMALL)
    report(options, peaks=peaks, pages=[pages_of_requests(small, options.pages_canvas, *method) for method in METHODS])


if __name__ == "__main__":
    main()
