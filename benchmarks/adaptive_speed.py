"""Speed and pages of the cache methods as the canvas grows, beside what their operation counts predict.

Each method decodes the same request, one token per step, at every canvas; the methods take turns. A method's time is
the sum over its kinds of step (refresh state, scope) of their number times the median time of one. Prediction: the
multiplications and additions of its layers, from its step plans, against those of `none`; for `dllm_cache` and
`maskkv` also dLLM-Cache's equation 10 (gated MLP).

    python benchmarks/adaptive_speed.py [--canvas 512 2048 8192] [--rounds 5 3 1] [--output FILE.json]

Times are processor seconds of the one computing thread, which other processes on the machine disturb less than the
clock. Of `none` only the first steps are run, `--none-steps`: they are all alike.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from random_engine import random_llada
from step_plans import plans_of, request_spec

from dllm_engine import LLM, DiffusionParams
from dllm_engine.bench.machine import machine
from dllm_engine.bench.passes import runner_of
from dllm_engine.model_executor.models.decoder import DecoderShape
from dllm_engine.scheduler.methods.dllm_cache import DLLMCacheOptions
from dllm_engine.scheduler.methods.maskkv import MaskKVOptions, prompt_budgets
from dllm_engine.scheduler.page_pool import PagePool
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.scheduler.step_plan import RowRule, Scope, StepPlan

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "dual": {},
    "sparse": {"retention_ratio": 0.5},
    "dkv": {"refresh_interval": 8},
    "dllm_cache": {},
    "maskkv": {},
}
BLOCK_LENGTH = 32


# Operation counts


def layer_flops(shape: DecoderShape, rows: int, keys: int) -> int:
    """One layer of ``rows`` that attend to ``keys`` (multi-head attention, gated MLP)."""
    d = shape.hidden_size
    return 8 * rows * d * d + 4 * rows * keys * d + 6 * rows * d * shape.intermediate_size


def step_flops(shape: DecoderShape, spec: DecodingSpec, plan: StepPlan) -> int:
    """All layers of one step; embedding, head and norms left out."""
    if isinstance(spec.cache, DLLMCacheOptions):
        return sum(adaptive_flops(shape, spec, plan, layer) for layer in range(shape.num_layers))
    if plan.rows is not RowRule.ALL:
        # dKV-Cache: what was masked when the previous step began, against the whole canvas.
        rows, keys = spec.gen_length - (plan.forward - 1), spec.canvas_length
    else:
        rows = plan.span.size
        keys = min(rows + plan.read, spec.canvas_length)
    return shape.num_layers * layer_flops(shape, rows, keys)


def adaptive_flops(shape: DecoderShape, spec: DecodingSpec, plan: StepPlan, layer: int) -> int:
    """One layer of a step of dLLM-Cache or MaskKV: what is refreshed, what is verified, what is chosen, the vote."""
    options, d = spec.cache, shape.hidden_size
    assert isinstance(options, DLLMCacheOptions)
    keys, vote = spec.canvas_length, 0
    if isinstance(options, MaskKVOptions):
        if plan.forward == 0:
            vote = 2 * spec.gen_length * spec.prompt_length * d
        else:
            keys = spec.gen_length + prompt_budgets(options, spec.prompt_length, shape.num_layers)[layer]
    if layer < options.refresh_first_layer:
        return layer_flops(shape, plan.span.size, keys) + vote
    refreshed = {
        Scope.ALL: spec.canvas_length,
        Scope.PROMPT: spec.prompt_length,
        Scope.RESPONSE: spec.gen_length,
        Scope.ACTIVE: 0,
    }[plan.scope]
    # All values of the response are projected to choose; the chosen rows need no others.
    num_updated = plan.num_updated or 0
    verify = 2 * (spec.gen_length - num_updated) * d * d if plan.num_updated is not None else 0
    return layer_flops(shape, refreshed + num_updated, keys) + verify + vote


def equation_10(shape: DecoderShape, spec: DecodingSpec) -> float:
    """dLLM-Cache's own estimate of a whole response."""
    options = spec.cache
    assert isinstance(options, DLLMCacheOptions)
    steps, kp, kr = spec.gen_length, options.prompt_refresh_interval, options.response_refresh_interval
    n, response = spec.canvas_length, spec.gen_length
    chosen = int(options.update_ratio * response)
    return shape.num_layers * (
        steps / kp * layer_flops(shape, n, n)
        + (steps / kr - steps / kp) * layer_flops(shape, response, n)
        + steps * (1 - 1 / kr) * layer_flops(shape, chosen, n)
    )


# Measurement


class PageWatch:
    """The most pages that an engine's requests reserved and held."""

    def __init__(self, pool: PagePool) -> None:
        self.most_reserved = self.most_allocated = 0
        reserve, resize = pool.reserve, pool.resize

        def reserving(request_id: str, num_pages: int) -> None:
            reserve(request_id, num_pages)
            self.most_reserved = max(self.most_reserved, pool.num_reserved)

        def resizing(request_id: str, table_sizes: list[int]) -> list[list[int]]:
            tables = resize(request_id, table_sizes)
            self.most_allocated = max(self.most_allocated, pool.num_allocated)
            return tables

        pool.reserve, pool.resize = reserving, resizing  # type: ignore[method-assign]

    def restart(self) -> None:
        self.most_reserved = self.most_allocated = 0


Kind = tuple[str, str, bool]
"""Steps of equal cost: refresh state, scope, whether it is a request's first."""


def kind_of(plan: StepPlan) -> Kind:
    return plan.state.value, plan.scope.value, plan.forward == 0


def decode(llm: LLM, request_id: str, plans: list[StepPlan], canvas: int, gen_length: int, num_steps: int) -> Any:
    """Run a request's first steps; yields each one's plan, processor seconds and pages held after it."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    params = DiffusionParams(gen_length=gen_length, block_length=BLOCK_LENGTH, ignore_eos=True)
    prompt = {"prompt_token_ids": [5 + i % 1000 for i in range(canvas - gen_length)]}
    engine.add_request(request_id, prompt, params)
    for plan in plans[:num_steps]:
        start = time.process_time()
        engine.step()
        yield plan, time.process_time() - start, scheduler.pages.num_allocated
    engine.abort_request([request_id])
    while engine.has_unfinished_requests():
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--canvas", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, nargs="+", default=[5, 3, 1], help="one number per canvas")
    parser.add_argument("--gen-length", type=int, default=64)
    parser.add_argument("--none-steps", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    engines = {
        method: random_llada(
            hidden_size=options.hidden_size,
            num_layers=options.layers,
            num_heads=options.heads,
            vocab_size=2048,
            max_model_len=max(options.canvas),
            dtype=options.dtype,
            max_num_seqs=1,
            cache_method=method,
            cache_options=cache_options,
        )
        for method, cache_options in METHODS.items()
    }
    watches = {m: PageWatch(llm.llm_engine.engine_core.engine_core.scheduler.pages) for m, llm in engines.items()}
    print(
        f"response {options.gen_length}, block {BLOCK_LENGTH}, one token per step, batch 1, d={options.hidden_size}, "
        f"{options.layers} layers, {options.dtype}; {machine()}"
    )
    figures = []
    for canvas, rounds in zip(options.canvas, options.rounds, strict=True):
        figures += measure_canvas(engines, watches, canvas, rounds, options.gen_length, options.none_steps)
        if options.output:
            settings = {k: v for k, v in vars(options).items() if k != "output"}
            report = {"machine": machine(), **settings, "block_length": BLOCK_LENGTH, "figures": figures}
            options.output.write_text(json.dumps(report, indent=1) + "\n")


def measure_canvas(
    engines: dict[str, LLM], watches: dict[str, PageWatch], canvas: int, rounds: int, gen_length: int, none_steps: int
) -> list[dict[str, Any]]:
    specs = {
        m: request_spec(canvas, gen_length, BLOCK_LENGTH, runner_of(llm).options.cache) for m, llm in engines.items()
    }
    plans = {method: plans_of(method, spec) for method, spec in specs.items()}
    times: dict[str, dict[Kind, list[float]]] = {method: defaultdict(list) for method in engines}
    held: dict[str, list[int]] = {method: [] for method in engines}
    for watch in watches.values():
        watch.restart()
    for number in range(rounds):
        for method, llm in engines.items():
            num_steps = none_steps if method == "none" else len(plans[method])
            for plan, seconds, pages in decode(llm, f"{canvas}-{number}", plans[method], canvas, gen_length, num_steps):
                times[method][kind_of(plan)].append(seconds)
                held[method].append(pages)
    print(f"\ncanvas {canvas}, medians of {rounds} rounds")
    print(
        f"{'method':>11} {'tokens/s':>9} {'over none':>10} {'predicted':>10} {'measured/predicted':>19} {'eq. 10':>8} "
        f"{'KiB reserved':>13} {'allocated':>10} {'held':>8}"
    )
    rows: list[dict[str, Any]] = []
    for method, llm in engines.items():
        runner = runner_of(llm)
        shape, spec = runner.model.shape, specs[method]
        # Steps of `none` that were not run are like those that were.
        medians = {kind: statistics.median(seconds) for kind, seconds in times[method].items()}
        seconds = sum(medians[kind_of(p)] for p in plans[method])
        flops = sum(step_flops(shape, spec, plan) for plan in plans[method])
        page_bytes = 0 if runner.pages is None else runner.pages.memory[0].numel() * runner.pages.memory.element_size()
        row: dict[str, Any] = {
            "canvas": canvas,
            "method": method,
            "cache_options": METHODS[method],
            "rounds": rounds,
            "tokens_per_second": gen_length / seconds,
            "gflop": flops / 1e9,
            "peak_reserved_bytes": watches[method].most_reserved * page_bytes,
            "peak_allocated_bytes": watches[method].most_allocated * page_bytes,
            # Mean over the steps but the last, after which all is freed.
            "held_bytes": statistics.mean(held[method][:-1]) * page_bytes,
            "step_kinds": {
                f"{state} {scope}{', first' if first else ''}": {
                    "steps": sum(kind_of(p) == (state, scope, first) for p in plans[method]),
                    "median_ms": 1e3 * median,
                }
                for (state, scope, first), median in medians.items()
            },
        }
        rows.append(row)
        base = rows[0]
        row["speed_over_none"] = row["tokens_per_second"] / base["tokens_per_second"]
        row["predicted_over_none"] = base["gflop"] / row["gflop"]
        row["measured_over_predicted"] = row["speed_over_none"] / row["predicted_over_none"]
        by_equation = ""
        if isinstance(spec.cache, DLLMCacheOptions):
            row["equation_10_over_none"] = 1e9 * base["gflop"] / equation_10(shape, spec)
            by_equation = f"{row['equation_10_over_none']:.1f}"
        print(
            f"{method:>11} {row['tokens_per_second']:>9.2f} {row['speed_over_none']:>10.1f} "
            f"{row['predicted_over_none']:>10.1f} {row['measured_over_predicted']:>19.2f} {by_equation:>8} "
            f"{row['peak_reserved_bytes'] / 1024:>13.0f} {row['peak_allocated_bytes'] / 1024:>10.0f} "
            f"{row['held_bytes'] / 1024:>8.0f}",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
