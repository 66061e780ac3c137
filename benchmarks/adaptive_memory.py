"""What two of MaskKV's savings are worth: no features of prompt rows, and logits of masked rows alone.

Neither changes a token. Pages are the most that a request reserved and held, with `exclude_prompt_states` on and off.
The peak is that of a request's first step (the process's high-water mark, less what it held before), as the engine
does it and with logits of the whole canvas, as code without this saving has them.

    python benchmarks/adaptive_memory.py [--canvas 512 2048] [--vocab-size 126464] [--output FILE.json]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from adaptive_speed import PageWatch
from random_engine import random_llada

from dllm_engine import LLM, DiffusionParams
from dllm_engine.bench.machine import machine
from dllm_engine.bench.memory import MIB, peak, restart_peak
from dllm_engine.bench.passes import runner_of

BLOCK_LENGTH = 32


def prompt_and_params(canvas: int, gen_length: int) -> tuple[dict[str, list[int]], DiffusionParams]:
    params = DiffusionParams(gen_length=gen_length, block_length=BLOCK_LENGTH, ignore_eos=True)
    return {"prompt_token_ids": [5 + i % 1000 for i in range(canvas - gen_length)]}, params


def first_steps(llm: LLM, canvas: int, gen_length: int, num_steps: int) -> None:
    """Run the first steps of a request, then give it up."""
    engine = llm.llm_engine
    engine.add_request("one", *prompt_and_params(canvas, gen_length))
    for _ in range(num_steps):
        engine.step()
    engine.abort_request(["one"])
    while engine.has_unfinished_requests():
        engine.step()


def pages_of(llm: LLM, watch: PageWatch, canvas: int, gen_length: int) -> dict[str, int]:
    """Bytes of pages that one request takes at most; the second step is an adaptive one."""
    watch.restart()
    first_steps(llm, canvas, gen_length, 2)
    memory = runner_of(llm).pages.memory  # type: ignore[union-attr]
    page_bytes = memory[0].numel() * memory.element_size()
    return {
        "peak_reserved_bytes": watch.most_reserved * page_bytes,
        "peak_allocated_bytes": watch.most_allocated * page_bytes,
    }


def peak_of_first_step(llm: LLM, canvas: int, gen_length: int) -> int:
    """Bytes that a request's first step takes at most beyond what was held before it."""
    first_steps(llm, canvas, gen_length, 1)
    engine = llm.llm_engine
    engine.add_request("one", *prompt_and_params(canvas, gen_length))
    before = restart_peak()
    engine.step()
    taken = peak() - before
    engine.abort_request(["one"])
    while engine.has_unfinished_requests():
        engine.step()
    return taken


def project_all_rows(llm: LLM) -> None:
    """Make an engine compute logits of every row of its batches before it looks at those of the masked ones."""
    runner = runner_of(llm)
    predict, compute_logits = runner.denoiser._predict, runner.model.compute_logits

    def predict_all(hidden: torch.Tensor, *args: Any) -> Any:
        everything = compute_logits(hidden)
        statistics = predict(hidden, *args)
        del everything
        return statistics

    runner.denoiser._predict = predict_all  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--canvas", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--gen-length", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=126_464)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()

    # All live to the end: shutting one down would take vLLM's process groups from the others.
    engines = []

    def engine(cache_method: str, **cache_options: Any) -> LLM:
        llm = random_llada(
            hidden_size=options.hidden_size,
            num_layers=options.layers,
            num_heads=4,
            vocab_size=options.vocab_size,
            max_model_len=max(options.canvas),
            dtype="float32",
            max_num_seqs=1,
            cache_method=cache_method,
            cache_options=cache_options,
        )
        engines.append(llm)
        return llm

    print(f"response {options.gen_length}, d={options.hidden_size}, {options.layers} layers, float32")
    print(f"\n{'method':>11} {'canvas':>7} {'prompt states':>14} {'MiB reserved':>13} {'allocated':>10}")
    figures: dict[str, list[dict[str, Any]]] = {"pages": [], "peaks": []}
    for method in ("dllm_cache", "maskkv"):
        for excluded in (False, True):
            llm = engine(method, exclude_prompt_states=excluded)
            watch = PageWatch(llm.llm_engine.engine_core.engine_core.scheduler.pages)
            for canvas in options.canvas:
                row = pages_of(llm, watch, canvas, options.gen_length)
                figures["pages"].append({"method": method, "canvas": canvas, "exclude_prompt_states": excluded} | row)
                reserved, allocated = (row[key] / MIB for key in ("peak_reserved_bytes", "peak_allocated_bytes"))
                kept = "excluded" if excluded else "kept"
                print(f"{method:>11} {canvas:>7} {kept:>14} {reserved:>13.2f} {allocated:>10.2f}", flush=True)
    print(f"\n{'canvas':>7} {'rows projected':>15} {'first step peak MiB':>20}   vocabulary {options.vocab_size}")
    llm = engine("maskkv")
    for everything in (False, True):
        if everything:
            project_all_rows(llm)
        for canvas in options.canvas:
            held = peak_of_first_step(llm, canvas, options.gen_length)
            figures["peaks"].append({"canvas": canvas, "all_rows": everything, "peak_bytes": held})
            print(f"{canvas:>7} {'canvas' if everything else 'masked':>15} {held / MIB:>20.0f}", flush=True)
    print(machine())
    if options.output:
        settings = {k: v for k, v in vars(options).items() if k != "output"}
        options.output.write_text(json.dumps({"machine": machine(), **settings, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
