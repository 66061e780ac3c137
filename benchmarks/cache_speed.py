"""Speed of the cache methods over recomputing everything, and over what their shapes alone would take.

For each method the same request is decoded once. The prediction is the sum over its steps of the measured time of that
step's matrix products and attention at that step's shapes (rows computed, keys attended to), with nothing around them.

    python benchmarks/cache_speed.py [--hidden-size 512 --layers 8 --canvas 1024 --gen-length 64] [--output FILE.json]
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from random_engine import random_llada
from step_plans import plans_of, request_spec

from dllm_engine import LLM, DiffusionParams
from dllm_engine.bench.floor import Floor, PassShape
from dllm_engine.bench.machine import machine
from dllm_engine.bench.passes import runner_of
from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.scheduler.step_plan import StepPlan

METHODS: dict[str, dict[str, float]] = {"none": {}, "prefix": {}, "dual": {}, "sparse": {"retention_ratio": 0.5}}
BLOCK_LENGTH = 32


def predict(model: DiffusionDecoder, plans: list[StepPlan], canvas: int) -> float:
    """Sum of the steps' floors, each distinct shape measured as the median of seven, taking turns."""
    shapes = [PassShape.of_plans([plan], [plan.span.size], [canvas], BLOCK_LENGTH // 2) for plan in plans]
    floors = {shape: Floor(model, shape) for shape in shapes}
    times: dict[PassShape, list[float]] = {shape: [] for shape in floors}
    for _ in range(7):
        for shape, floor in floors.items():
            times[shape].append(floor.seconds())
    return sum(statistics.median(times[shape]) for shape in shapes)


def decode_seconds(llm: LLM, canvas: int, gen_length: int) -> float:
    prompt = {"prompt_token_ids": [5 + i % 1000 for i in range(canvas - gen_length)]}
    params = DiffusionParams(gen_length=gen_length, block_length=BLOCK_LENGTH, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([prompt], params, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--canvas", type=int, default=1024)
    parser.add_argument("--gen-length", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    engines = {
        method: random_llada(
            hidden_size=options.hidden_size,
            num_layers=options.layers,
            num_heads=options.heads,
            vocab_size=options.vocab_size,
            max_model_len=options.canvas,
            dtype=options.dtype,
            max_num_seqs=1,
            cache_method=method,
            cache_options=cache_options,
        )
        for method, cache_options in METHODS.items()
    }
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    predictions: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(options.rounds):
        for method, llm in engines.items():
            runner = runner_of(llm)
            spec = request_spec(options.canvas, options.gen_length, BLOCK_LENGTH, runner.options.cache)
            predictions[method].append(predict(runner.model, plans_of(method, spec), options.canvas))
            seconds[method].append(decode_seconds(llm, options.canvas, options.gen_length))
    print(
        f"canvas {options.canvas}, response {options.gen_length}, block {BLOCK_LENGTH}, one token per step, "
        f"d={options.hidden_size}, {options.layers} layers, {options.dtype}, batch 1"
    )
    print(f"{machine()}; medians of {options.rounds} rounds")
    print(f"{'method':>8} {'seconds':>9} {'predicted':>10} {'predicted/measured':>19} {'over none':>10}")
    base = statistics.median(seconds["none"])
    figures = []
    for method in METHODS:
        measured, predicted = statistics.median(seconds[method]), statistics.median(predictions[method])
        row = {
            "method": method,
            "seconds": measured,
            "predicted_seconds": predicted,
            "predicted_over_measured": predicted / measured,
            "speed_over_none": base / measured,
        }
        figures.append(row)
        print(
            f"{method:>8} {measured:>9.2f} {predicted:>10.2f} {row['predicted_over_measured']:>19.2f} "
            f"{row['speed_over_none']:>10.2f}"
        )
    if options.output:
        settings = {k: v for k, v in vars(options).items() if k != "output"}
        options.output.write_text(json.dumps({"machine": machine(), **settings, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
