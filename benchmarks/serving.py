"""Serving: a server under load, the gap between blocks while a long request arrives, steps with a long queue.

    python -m benchmarks.serving load [--minutes 10] [--clients 16] [--output FILE.json]
    python -m benchmarks.serving load --url http://127.0.0.1:8000 [--pid 4711]
    python -m benchmarks.serving latency [--method sparse --rounds 3] [--steps-per-block 4] [--output FILE.json]
    python -m benchmarks.serving queue [--waiting 100 10000] [--output FILE.json]

``load`` puts a server under the load of ``load_clients.py`` and lists what went wrong; the exit status is then 1.
Without ``--url`` it starts ``dllm serve demo``, in float32 so that no token depends on the batch, with less room than
there are clients. ``--pid`` is the process of a running server whose memory is to be watched.

``latency``: four requests run in an engine. In every second scenario a request with a prompt of 2,048 tokens arrives
once each of the four has finished a block, and runs beside them to its end. Gaps between two blocks of the four count,
in both scenarios, between the newcomer's arrival and its end (without it: over as many blocks as there are). The
newcomer also runs alone, for the time of its own steps. All of it is done with refreshes bounded by ``--refresh-ratio``
and with no bound, taking turns.

    bound = 2 × (p99 gap without it + one REUSE step of it) + one whole-canvas step of it

``queue``: the median time of a step with the batch full, while at least half of the queue still waits, on a model so
small that a step is mostly scheduling and messages.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from benchmarks.load_clients import NUM_ASKS, NUM_CLIENTS, SERVER, Load, draw_asks
from benchmarks.program import Rows, add_common_arguments, add_model_arguments, parse, report, start_engine
from dllm_engine import LLM, DiffusionParams
from dllm_engine.bench.cells import Distribution
from dllm_engine.bench.machine import now
from dllm_engine.bench.passes import observed_step
from tests.support.server import running

NEWCOMER = "newcomer"


def load(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        start = nullcontext() if options.url else running("dllm", *SERVER, log=Path(folder) / "log")
        with start as server:
            url, pid = (server.url, server.process.pid) if server else (options.url, options.pid)
            clients = Load(url, draw_asks(NUM_ASKS, options.seed), options.seed)
            found = asyncio.run(clients.run(options.clients, options.minutes * 60, pid))
    memory = (
        {}
        if not found.memory
        else {
            "memory_mib": {"first": found.memory[0], "highest": max(found.memory), "last": found.memory[-1]},
            "memory_growth_after_warm_up": found.memory_growth,
        }
    )
    server_command = {} if options.url else {"server": "dllm " + " ".join(SERVER)}
    report(options, **server_command, outcomes=dict(found.outcomes), **memory, violations=found.violations)
    return 1 if found.violations else 0


# The gap between blocks


def params(gen_length: int, options: argparse.Namespace) -> DiffusionParams:
    steps = -(-gen_length // options.block_length) * min(options.steps_per_block, options.block_length)
    return DiffusionParams(
        gen_length=gen_length, block_length=options.block_length, steps=min(steps, gen_length), ignore_eos=True
    )


def gaps_of_running(llm: LLM, options: argparse.Namespace, *, with_newcomer: bool) -> tuple[list[float], float]:
    """Seconds between neighbouring blocks of the running requests, and the newcomer's latency (0 without it)."""
    engine = llm.llm_engine
    blocks: dict[str, list[float]] = {f"running-{i}": [] for i in range(options.running)}
    for i, request_id in enumerate(blocks):
        prompt = {"prompt_token_ids": [1 + i] * options.prompt}
        engine.add_request(request_id, prompt, params(options.gen_length, options))
    arrived = left = None
    while engine.has_unfinished_requests():
        if arrived is None and all(blocks.values()):
            arrived = now()
            if with_newcomer:
                add_newcomer(llm, options)
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


def add_newcomer(llm: LLM, options: argparse.Namespace) -> None:
    prompt = {"prompt_token_ids": [9] * options.newcomer_prompt}
    llm.llm_engine.add_request(NEWCOMER, prompt, params(options.newcomer_response, options))


def steps_alone(llm: LLM, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per forward pass of the newcomer on its own, by kind."""
    add_newcomer(llm, options)
    seconds: dict[str, list[float]] = {"whole": [], "reuse": []}
    while llm.llm_engine.has_unfinished_requests():
        dispatch = observed_step(llm)
        for forward, of_pass in dispatch.timed_passes:
            if forward.kind is not None:
                seconds[forward.kind].append(of_pass)
    return seconds


def latency(options: argparse.Namespace) -> int:
    longest = options.newcomer_prompt + options.newcomer_response
    engines = {
        ratio: start_engine(options, longest, options.running + 1, cache_method=options.method, refresh_ratio=ratio)
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
            gaps_beside, newcomer_latency = gaps_of_running(llm, options, with_newcomer=True)
            if not number:  # the first round warms up
                continue
            # Without the newcomer the engines do the same.
            without += gaps_without
            beside[ratio] += gaps_beside
            latencies[ratio].append(newcomer_latency)
            for kind, seconds in steps.items():
                alone[kind] += seconds
    if not alone["reuse"]:
        raise SystemExit(f"--method {options.method} has no REUSE steps; choose a cache method that has")
    whole, reuse = statistics.median(alone["whole"]), statistics.median(alone["reuse"])
    bound = 2 * (float(np.percentile(without, 99)) + reuse) + whole
    scenarios: Rows = [{"scenario": "alone"}]
    scenarios += [
        {"scenario": "beside", "refresh_ratio": ratio, "newcomer_latency_ms": 1e3 * statistics.median(seconds)}
        for ratio, seconds in latencies.items()
    ]
    figures = []
    for scenario, seconds in zip(scenarios, (without, *beside.values()), strict=True):
        gap = Distribution.of_values(seconds)
        shown = {"gap_p50_ms": 1e3 * gap.median, "gap_p99_ms": 1e3 * gap.p99, "of": gap.of}
        figures.append(scenario | shown | {"within_bound": gap.p99 <= bound})
    report(
        options,
        newcomer_reuse_ms=1e3 * reuse,
        newcomer_whole_ms=1e3 * whole,
        bound_ms=1e3 * bound,
        figures=figures,
    )
    return 0


# The queue


def time_of_steps(llm: LLM, num_waiting: int) -> dict[str, float]:
    """Time to queue a request, and of a step with a full batch."""
    engine = llm.llm_engine
    asked = DiffusionParams(gen_length=4, block_length=4, ignore_eos=True)
    start = now()
    for number in range(num_waiting):
        engine.add_request(str(number), {"prompt_token_ids": [1 + number % 400]}, asked)
    queueing = (now() - start) / num_waiting
    times, finished = [], 0
    while engine.has_unfinished_requests():
        start = now()
        finished += sum(output.finished for output in engine.step())
        if finished < num_waiting // 2:
            times.append(now() - start)
    assert finished == num_waiting, f"{finished} of {num_waiting} requests were answered"
    return {"waiting": num_waiting, "queueing_ms": 1e3 * queueing, "step_ms": 1e3 * statistics.median(times)}


def queue(options: argparse.Namespace) -> int:
    llm = start_engine(options, max_model_len=64, max_num_seqs=16)
    time_of_steps(llm, 100)  # warms up
    report(options, figures=[time_of_steps(llm, num_waiting) for num_waiting in options.waiting])
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True, metavar="MODE")

    clients = modes.add_parser("load", help="a server under load")
    add_common_arguments(clients)
    clients.add_argument("--minutes", type=float, default=10.0)
    clients.add_argument("--clients", type=int, default=NUM_CLIENTS)
    clients.add_argument("--seed", type=int, default=0)
    clients.add_argument("--url", help="of a running server of the demo model; default: start one")
    clients.add_argument("--pid", type=int, help="process of the server at --url, to watch its memory")

    gaps = modes.add_parser("latency", help="the gap between two blocks while a long request arrives")
    add_common_arguments(gaps)
    add_model_arguments(gaps, hidden_size=256, layers=4, heads=4, vocab_size=8192)
    gaps.add_argument("--method", default="sparse", help="a cache method with REUSE steps")
    gaps.add_argument("--running", type=int, default=4)
    gaps.add_argument("--prompt", type=int, default=128)
    gaps.add_argument("--gen-length", type=int, default=192)
    gaps.add_argument("--block-length", type=int, default=32)
    gaps.add_argument("--steps-per-block", type=int, default=32, help="with few, refreshes are most of the work")
    gaps.add_argument("--refresh-ratio", type=float, default=1.0)
    gaps.add_argument("--newcomer-prompt", type=int, default=2048)
    gaps.add_argument("--newcomer-response", type=int, default=64)
    gaps.add_argument("--rounds", type=int, default=3)

    steps = modes.add_parser("queue", help="steps with a long queue")
    add_common_arguments(steps)
    add_model_arguments(steps, hidden_size=64, layers=1, heads=2, vocab_size=512)
    steps.add_argument("--waiting", type=int, nargs="+", default=[100, 1_000, 10_000])

    options = parse(parser)
    return {"load": load, "latency": latency, "queue": queue}[options.mode](options)


if __name__ == "__main__":
    sys.exit(main())
