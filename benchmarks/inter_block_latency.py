"""The gap between two blocks of a response while a long request arrives and runs beside it.

Four requests run. In every second scenario a request with a prompt of 2,048 tokens arrives once each of the four has
finished a block, and runs beside them to its end. Gaps count, in both scenarios, between the newcomer's arrival and its
end (without it: over as many blocks as there are). The newcomer also runs alone, for the time of its own steps. All of
it is done with refreshes bounded by ``--refresh-ratio`` and with no bound, taking turns.

    bound = 2 × (p99 gap without it + one REUSE step of it) + one whole-canvas step of it

    python benchmarks/inter_block_latency.py [--method sparse --rounds 3] [--output FILE.json]
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from random_engine import random_llada

from dllm_engine import LLM, DiffusionParams
from dllm_engine.bench.machine import CLOCKS, machine, now, use_clock
from dllm_engine.bench.passes import PassWatch
from dllm_engine.bench.percentiles import percentile

NEWCOMER = "newcomer"


def in_ms(seconds: list[float]) -> dict[str, float]:
    return {"p50": 1e3 * percentile(seconds, 50), "p99": 1e3 * percentile(seconds, 99), "of": len(seconds)}


def params(gen_length: int, options: argparse.Namespace) -> DiffusionParams:
    steps = -(-gen_length // options.block_length) * min(options.steps_per_block, options.block_length)
    return DiffusionParams(
        gen_length=gen_length, block_length=options.block_length, steps=min(steps, gen_length), ignore_eos=True
    )


def gaps_of_running(llm: LLM, options: argparse.Namespace, *, with_newcomer: bool) -> tuple[list[float], float]:
    """Seconds between neighbouring blocks of the running requests, and the newcomer's latency (0 without it)."""
    engine = llm.llm_engine
    running = [f"running-{i}" for i in range(options.running)]
    for i, request_id in enumerate(running):
        prompt = {"prompt_token_ids": [1 + i] * options.prompt}
        engine.add_request(request_id, prompt, params(options.gen_length, options))
    blocks: dict[str, list[float]] = {request_id: [] for request_id in running}
    arrived = left = None
    while engine.has_unfinished_requests():
        if arrived is None and all(blocks.values()):
            arrived = now()
            if with_newcomer:
                prompt = {"prompt_token_ids": [9] * options.newcomer_prompt}
                engine.add_request(NEWCOMER, prompt, params(options.newcomer_response, options))
        outputs = engine.step()
        moment = now()
        for output in outputs:
            if output.request_id != NEWCOMER:
                blocks[output.request_id].append(moment)
            elif output.finished:
                left = moment
    assert arrived is not None
    if with_newcomer and (left is None or left > min(times[-1] for times in blocks.values())):
        raise SystemExit("the newcomer outlived those it runs beside; raise --gen-length")
    end = left if left is not None else float("inf")
    # Gaps that the newcomer's time touches.
    gaps = [b - a for times in blocks.values() for a, b in itertools.pairwise(times) if b > arrived and a < end]
    return gaps, 0.0 if left is None else left - arrived


def steps_alone(llm: LLM, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per forward pass of the newcomer on its own, by kind."""
    engine, watch = llm.llm_engine, PassWatch(llm)
    prompt = {"prompt_token_ids": [9] * options.newcomer_prompt}
    engine.add_request(NEWCOMER, prompt, params(options.newcomer_response, options))
    seconds: dict[str, list[float]] = {"whole": [], "reuse": []}
    with watch.watching():
        while engine.has_unfinished_requests():
            watch.before_dispatch()
            start = now()
            engine.step()
            taken, passes = now() - start, watch.take()
            kinds = {forward.kind for forward in passes}
            if len(kinds) == 1 and (kind := kinds.pop()) is not None:
                seconds[kind].append(taken / len(passes))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="sparse", help="a cache method with REUSE steps")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--running", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--gen-length", type=int, default=192)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--steps-per-block", type=int, default=32, help="with few, refreshes are most of the work")
    parser.add_argument("--refresh-ratio", type=float, default=1.0)
    parser.add_argument("--newcomer-prompt", type=int, default=2048)
    parser.add_argument("--newcomer-response", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, help="row budget of a step (default: all requests' rows)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: hardly sees what else runs here")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    use_clock(options.clock)
    budget = (
        {} if options.max_num_batched_tokens is None else {"max_num_batched_tokens": options.max_num_batched_tokens}
    )
    # Both at once: an engine that ends takes vLLM's process groups along.
    engines = {
        ratio: random_llada(
            hidden_size=options.hidden_size,
            num_layers=options.layers,
            num_heads=options.heads,
            vocab_size=options.vocab_size,
            max_model_len=options.newcomer_prompt + options.newcomer_response,
            dtype=options.dtype,
            max_num_seqs=options.running + 1,
            cache_method=options.method,
            kv_cache_memory_bytes=1 << 30,
            refresh_ratio=ratio,
            **budget,
        )
        for ratio in (None, options.refresh_ratio)
    }
    without: list[float] = []
    beside: dict[float | None, list[float]] = {ratio: [] for ratio in engines}
    latencies: dict[float | None, list[float]] = {ratio: [] for ratio in engines}
    alone: dict[str, list[float]] = {"whole": [], "reuse": []}
    for number in range(options.rounds + 1):
        for ratio, llm in engines.items():
            steps = steps_alone(llm, options)
            gaps_without, _ = gaps_of_running(llm, options, with_newcomer=False)
            gaps_beside, latency = gaps_of_running(llm, options, with_newcomer=True)
            if not number:  # the first round warms up
                continue
            # Without the newcomer the engines do the same.
            without += gaps_without
            beside[ratio] += gaps_beside
            latencies[ratio].append(latency)
            for kind, seconds in steps.items():
                alone[kind] += seconds
    if not alone["reuse"]:
        raise SystemExit(f"--method {options.method} has no REUSE steps; choose a cache method that has")
    whole, reuse = statistics.median(alone["whole"]), statistics.median(alone["reuse"])
    bound = 2 * (percentile(without, 99) + reuse) + whole
    figures: dict[str, Any] = {
        "gap_without_ms": in_ms(without),
        "newcomer_reuse_ms": 1e3 * reuse,
        "newcomer_whole_ms": 1e3 * whole,
        "bound_ms": 1e3 * bound,
        "beside": [
            {
                "refresh_ratio": ratio,
                "gap_ms": in_ms(gaps),
                "newcomer_latency_ms": 1e3 * statistics.median(latencies[ratio]),
                "within_bound": percentile(gaps, 99) <= bound,
            }
            for ratio, gaps in beside.items()
        ],
    }
    print(
        f"{options.method}, {options.running} requests of prompt {options.prompt} and response {options.gen_length}, "
        f"newcomer {options.newcomer_prompt} and {options.newcomer_response}, block {options.block_length}, "
        f"d={options.hidden_size}, {options.layers} layers, {options.dtype}"
    )
    print(f"{machine()}, {options.clock} clock; {options.rounds} rounds")
    gap = figures["gap_without_ms"]
    print(f"gap without the newcomer: p50 {gap['p50']:.0f} ms, p99 {gap['p99']:.0f} ms (of {gap['of']})")
    print(
        f"newcomer: a REUSE step {1e3 * reuse:.1f} ms, a whole-canvas step {1e3 * whole:.1f} ms; "
        f"bound {1e3 * bound:.0f} ms"
    )
    for row in figures["beside"]:
        gap, within = row["gap_ms"], "within" if row["within_bound"] else "ABOVE"
        print(
            f"refresh_ratio={row['refresh_ratio']}: gap beside it p50 {gap['p50']:.0f} ms, p99 {gap['p99']:.0f} ms "
            f"(of {gap['of']}), {within} the bound; its latency {row['newcomer_latency_ms']:.0f} ms"
        )
    if options.output:
        settings = {k: v for k, v in vars(options).items() if k != "output"}
        options.output.write_text(json.dumps({"machine": machine(), **settings, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
