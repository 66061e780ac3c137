"""Time of the engine's steps over their floor: those over the whole canvas, and those that compute a block alone.

The floor is what no implementation of the step can leave out: the model's own linear layers, the attention of its
layers and the head on the masked rows of the block, on the same weights, in the same process, with the same threads
(``dllm_engine/bench/floor.py``). Engine and floor take turns; the figures are medians over the pairs.

    python benchmarks/step_time.py [--hidden-size 1024 --layers 8 --canvas 512 --pairs 9] [--output FILE.json]

``none`` shows whole-canvas (FULL) steps, ``dual`` and ``sparse`` show REUSE steps too.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from random_engine import random_llada

from dllm_engine import LLM, DiffusionParams
from dllm_engine.bench.floor import Floor, PassShape
from dllm_engine.bench.machine import CLOCKS, machine, now, use_clock
from dllm_engine.bench.passes import PassWatch, runner_of

BLOCK_LENGTH = 32


def measure(llm: LLM, method: str, batch: int, canvas: int, pairs: int) -> list[dict[str, Any]]:
    """Medians of engine step, floor, and their ratio, in milliseconds, per kind of step that the method has."""
    engine = llm.llm_engine
    model = runner_of(llm).model
    gen_length = canvas // 2
    for i in range(batch):
        engine.add_request(
            f"{batch}-{i}",
            {"prompt_token_ids": [1 + i] * (canvas - gen_length)},
            DiffusionParams(gen_length=gen_length, block_length=BLOCK_LENGTH, ignore_eos=True),
        )
    watch = PassWatch(llm)
    floors: dict[PassShape, Floor] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    wanted = {"whole"} if method == "none" else {"whole", "reuse"}
    with watch.watching():
        engine.step()  # warms up
        watch.take()
        while any(len(times.get(kind, ())) < pairs for kind in wanted) and engine.has_unfinished_requests():
            watch.before_dispatch()
            start = now()
            engine.step()
            seconds = now() - start
            passes = watch.take()
            kinds = {forward.kind for forward in passes}
            if len(kinds) != 1 or (kind := kinds.pop()) is None or len(times.setdefault(kind, [])) >= pairs:
                continue
            floor = 0.0
            for forward in passes:
                if forward.shape not in floors:
                    floors[forward.shape] = Floor(model, forward.shape)
                    floors[forward.shape].seconds()
                floor += floors[forward.shape].seconds()
            times[kind].append((seconds, floor))
    engine.abort_request([f"{batch}-{i}" for i in range(batch)])
    while engine.has_unfinished_requests():
        engine.step()
    return [
        {
            "method": method,
            "kind": kind,
            "batch": batch,
            "pairs": len(of_kind),
            "step_ms": 1e3 * statistics.median(step for step, _ in of_kind),
            "floor_ms": 1e3 * statistics.median(floor for _, floor in of_kind),
            "floor_over_step": statistics.median(floor / step for step, floor in of_kind),
        }
        for kind, of_kind in sorted(times.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--canvas", type=int, default=512)
    parser.add_argument("--methods", nargs="+", default=["none", "dual", "sparse"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--pairs", type=int, default=9, help="of each kind of step, where a response has as many")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: hardly sees what else runs here")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    use_clock(options.clock)
    print(f"canvas {options.canvas}, d={options.hidden_size}, {options.layers} layers, {options.dtype}")
    print(f"{'method':>8} {'kind':>6} {'batch':>6} {'pairs':>6} {'step ms':>10} {'floor ms':>10} {'floor/step':>11}")
    # All at once: an engine that ends takes vLLM's process groups along.
    engines = {
        method: random_llada(
            hidden_size=options.hidden_size,
            num_layers=options.layers,
            num_heads=options.heads,
            vocab_size=options.vocab_size,
            max_model_len=options.canvas,
            dtype=options.dtype,
            max_num_seqs=max(options.batch),
            cache_method=method,
            kv_cache_memory_bytes=1 << 30,
        )
        for method in options.methods
    }
    figures = []
    for method, llm in engines.items():
        for batch in options.batch:
            for row in measure(llm, method, batch, options.canvas, options.pairs):
                figures.append(row)
                print(
                    f"{row['method']:>8} {row['kind']:>6} {row['batch']:>6} {row['pairs']:>6} {row['step_ms']:>10.1f} "
                    f"{row['floor_ms']:>10.1f} {row['floor_over_step']:>11.2f}",
                    flush=True,
                )
    print(f"{machine()}, {options.clock} clock; medians of interleaved pairs")
    if options.output:
        settings = {k: v for k, v in vars(options).items() if k != "output"}
        options.output.write_text(json.dumps({"machine": machine(), **settings, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
