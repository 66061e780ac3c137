"""Time of the engine's steps over their floor: those over the whole canvas, and those
that compute a block alone.

The floor is what no implementation of the step can leave out: the model's own linear
layers, the attention of its layers and the head on the masked rows of the block, on the
same weights, in the same process, with the same threads (``floor.py``). Engine and
floor take turns; the figures are medians over the pairs.

    python benchmarks/step_time.py [--model llada-8b/4 --canvas 512 --pairs 9] [--output
    FILE.json]

``none`` shows whole-canvas (FULL) steps, ``dual`` and ``sparse`` show REUSE steps too,
and ``block`` those that keep a finished block with the next one's first step (UPDATE):

    python benchmarks/step_time.py --model sdar-8b/4 --methods block --batch 1 4 16

``--cuda-graphs`` records what can be recorded, ``--no-cuda-graphs`` launches each
kernel.

With ``--overhead`` it measures what a dispatch costs beside the model instead: the time
of ``LLMEngine.step`` less that of embedding, layers, final norm and head. What is left
is scheduling, building the batch, token statistics (which grow with rows and
vocabulary, and are shown on their own as well), unmasking, reports and vLLM's front
end.

    python benchmarks/step_time.py --overhead --model llada-8b/16 --canvas 96
    --gen-length 32 --methods sparse \
        --batch 1 32 --steps-per-dispatch 1 8
"""

import argparse
import statistics
from collections import defaultdict
from typing import Any

from floor import Floor
from passes import Dispatch, InnerTimes, inner_times, observed_step
from program import Rows, argument_parser, report

from dllm_engine import LLM, DiffusionParams
from dllm_engine.evaluation.bench import random_engine
from dllm_engine.evaluation.runner import runner_of

BLOCK_LENGTH = 32
"""Not of models whose attention goes by blocks: theirs have a length of their own."""


def add_requests(llm: LLM, batch: int, options: argparse.Namespace) -> list[str]:
    request_ids = [f"{batch}-{i}" for i in range(batch)]
    block_length = runner_of(llm).family.attention_block or BLOCK_LENGTH
    params = DiffusionParams(
        gen_length=options.gen_length, block_length=block_length, ignore_eos=True
    )
    llm.reset_prefix_cache()  # the prompts of a smaller batch
    for i, request_id in enumerate(request_ids):
        prompt = {"prompt_token_ids": [1 + i] * (options.canvas - options.gen_length)}
        llm.llm_engine.add_request(request_id, prompt, params)
    return request_ids


def steps_over_floors(llm: LLM, batch: int, options: argparse.Namespace) -> Rows:
    """Medians of engine step, floor, and their ratio, in milliseconds, per kind of step
    that the method has.
    """
    if (pages := runner_of(llm).rank.pages) is not None:
        pages.memory.zero_()  # the first write to memory waits for the operating system
    request_ids = add_requests(llm, batch, options)
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    engine = runner_of(llm).options
    wanted = {"whole"} if engine.cache_method == "none" else {"whole", "reuse"}
    if engine.method.keeps_for_good:
        wanted = {"update", "reuse"}
    observed_step(llm)  # warms up
    while (
        any(len(times[kind]) < options.pairs for kind in wanted)
        and llm.llm_engine.has_unfinished_requests()
    ):
        dispatch = observed_step(llm)
        if dispatch.kind is None or len(times[dispatch.kind]) >= options.pairs:
            continue
        # None is kept: it would hold memory that the engine has written to, and steps
        # would take other.
        floors = (
            Floor(runner_of(llm).model, forward.shape).seconds()
            for forward in dispatch.passes
        )
        times[dispatch.kind].append((dispatch.seconds, sum(floors)))
    llm.llm_engine.abort_request(request_ids)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return [
        {
            "kind": kind,
            "pairs": len(pairs),
            "step_ms": 1e3 * statistics.median(step for step, _ in pairs),
            "floor_ms": 1e3 * statistics.median(floor for _, floor in pairs),
            "floor_over_step": statistics.median(floor / step for step, floor in pairs),
            "lowest": min(floor / step for step, floor in pairs),
            "highest": max(floor / step for step, floor in pairs),
        }
        for kind, pairs in sorted(times.items())
        if pairs
    ]


def overheads(llm: LLM, batch: int, options: argparse.Namespace) -> Rows:
    """Medians over the dispatches of whole responses, in milliseconds, per kind of
    step; each first one warms up.
    """
    measured: dict[str, Rows] = defaultdict(list)
    for _ in range(options.rounds):
        add_requests(llm, batch, options)
        with inner_times(llm) as take:
            observed_step(llm)  # warms up
            take()
            while llm.llm_engine.has_unfinished_requests():
                dispatch, inner = observed_step(llm), take()
                if dispatch.kind is not None:
                    measured[dispatch.kind].append(parts_of(dispatch, inner))
    return [
        {"kind": kind, "dispatches": len(rows)}
        | {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for kind, rows in sorted(measured.items(), reverse=True)
    ]


def parts_of(dispatch: Dispatch, inner: InnerTimes) -> dict[str, float]:
    """Parts of a dispatch, in milliseconds."""
    num_passes = len(dispatch.passes)
    overhead_ms = 1e3 * (dispatch.seconds - inner.model)
    return {
        "passes_per_dispatch": num_passes,
        "dispatch_ms": 1e3 * dispatch.seconds,
        "model_ms": 1e3 * inner.model,
        "overhead_ms": overhead_ms,
        "overhead_per_pass_ms": overhead_ms / num_passes,
        "token_statistics_ms": 1e3 * inner.statistics,
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--model",
        default="llada-8b/4",
        help="random weights of a named shape (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.6,
        metavar="SHARE",
        help="of a GPU that must be free when an engine starts; earlier ones keep "
        "theirs (default: %(default)s)",
    )
    parser.add_argument("--canvas", type=int, default=512)
    parser.add_argument("--gen-length", type=int, help="default: half the canvas")
    parser.add_argument("--methods", nargs="+", default=["none", "dual", "sparse"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="default: the engine's",
    )
    parser.add_argument("--steps-per-dispatch", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--pairs",
        type=int,
        default=9,
        help="of each kind of step, where a response has as many",
    )
    parser.add_argument(
        "--overhead",
        action="store_true",
        help="time beside the model instead of time over the floor",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="responses that --overhead measures"
    )
    options = parser.parse_args()
    options.gen_length = options.gen_length or options.canvas // 2
    settings: dict[str, Any] = {
        "dtype": options.dtype,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "max_model_len": options.canvas,
        "max_num_seqs": max(options.batch),
        "max_num_batched_tokens": max(options.batch) * options.canvas,
        "kv_cache_memory_bytes": 1 << 30,
    }
    if options.cuda_graphs is not None:
        settings["cuda_graphs"] = options.cuda_graphs
    # All stay until the program ends: an engine that is dropped takes vLLM's process
    # groups from the others.
    engines = {
        (method, steps): random_engine(
            options.model, cache_method=method, steps_per_dispatch=steps, **settings
        )
        for method in options.methods
        for steps in options.steps_per_dispatch
    }
    figures: Rows = []
    for (method, steps), llm in engines.items():
        for batch in options.batch:
            cell: dict[str, Any] = {
                "method": method,
                "steps_per_dispatch": steps,
                "batch": batch,
            }
            measure = overheads if options.overhead else steps_over_floors
            figures += [cell | row for row in measure(llm, batch, options)]
    report(options, figures)


if __name__ == "__main__":
    main()
