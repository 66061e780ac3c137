"""What the engine adds to each dispatch: the time of ``LLMEngine.step`` less that inside the model.

The model is embedding, layers (with attention over pages), final norm and head. What is left is scheduling, building
the batch, token statistics (which grow with rows and vocabulary, and are shown on their own as well), unmasking,
reports and vLLM's front end. Medians over the dispatches of a response, without the first; outputs come with the
blocks, so a median is of a dispatch within a block.

    python benchmarks/engine_overhead.py [--methods none sparse --batch 1 32] [--output FILE.json]
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from random_engine import random_llada

from dllm_engine import LLM, DiffusionParams
from dllm_engine.bench.machine import CLOCKS, machine, now, use_clock
from dllm_engine.bench.passes import InnerTime, InnerTimes, PassWatch


@dataclass(frozen=True)
class Dispatch:
    """One call of ``LLMEngine.step``."""

    seconds: float
    inner: InnerTimes
    passes: int
    kinds: set[str | None]

    @property
    def overhead(self) -> float:
        return self.seconds - self.inner.model


def dispatches(llm: LLM, batch: int, prompt: int, gen_length: int, block_length: int) -> list[Dispatch]:
    """One response of each request: time, time in the model, and forward passes of every dispatch."""
    engine = llm.llm_engine
    params = DiffusionParams(gen_length=gen_length, block_length=block_length, ignore_eos=True)
    for i in range(batch):
        engine.add_request(str(i), {"prompt_token_ids": [1 + i] * prompt}, params)
    inner_time, watch = InnerTime(llm), PassWatch(llm)
    made: list[Dispatch] = []
    with inner_time.watching(), watch.watching():
        while engine.has_unfinished_requests():
            watch.before_dispatch()
            start = now()
            engine.step()
            seconds = now() - start
            inner, passes = inner_time.take(), watch.take()
            if passes:
                made.append(Dispatch(seconds, inner, len(passes), {forward.kind for forward in passes}))
    return made[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--gen-length", type=int, default=64)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--methods", nargs="+", default=["none", "sparse"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--steps-per-dispatch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: hardly sees what else runs here")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    use_clock(options.clock)
    engines = {
        (method, steps): random_llada(
            hidden_size=options.hidden_size,
            num_layers=options.layers,
            num_heads=options.heads,
            vocab_size=options.vocab_size,
            max_model_len=options.prompt + options.gen_length,
            dtype=options.dtype,
            max_num_seqs=max(options.batch),
            cache_method=method,
            kv_cache_memory_bytes=1 << 30,
            steps_per_dispatch=steps,
        )
        for method in options.methods
        for steps in options.steps_per_dispatch
    }
    made: dict[tuple[str, int, int], list[Dispatch]] = {}
    for _ in range(options.rounds):
        for (method, steps), llm in engines.items():
            for batch in options.batch:
                lengths = (options.prompt, options.gen_length, options.block_length)
                made.setdefault((method, steps, batch), []).extend(dispatches(llm, batch, *lengths))
    print(
        f"prompt {options.prompt}, response {options.gen_length}, block {options.block_length}, "
        f"d={options.hidden_size}, {options.layers} layers, vocabulary {options.vocab_size}, {options.dtype}"
    )
    print(f"{machine()}, {options.clock} clock; medians over the dispatches of {options.rounds} rounds")
    print(
        f"{'method':>8} {'steps':>6} {'batch':>6} {'kind':>6} {'dispatches':>11} {'passes each':>12} "
        f"{'dispatch ms':>12} {'model ms':>9} {'overhead ms':>12} {'per pass ms':>12} {'of it tokens':>14}"
    )
    figures = []
    for (method, steps, batch), of_cell in made.items():
        for kind in ("whole", "reuse"):
            of_kind = [dispatch for dispatch in of_cell if dispatch.kinds == {kind}]
            if not of_kind:
                continue
            row = {
                "method": method,
                "steps_per_dispatch": steps,
                "batch": batch,
                "kind": kind,
                "dispatches": len(of_kind),
                "passes_per_dispatch": statistics.median(d.passes for d in of_kind),
                "dispatch_ms": 1e3 * statistics.median(d.seconds for d in of_kind),
                "model_ms": 1e3 * statistics.median(d.inner.model for d in of_kind),
                "overhead_ms": 1e3 * statistics.median(d.overhead for d in of_kind),
                "overhead_per_pass_ms": 1e3 * statistics.median(d.overhead / d.passes for d in of_kind),
                "token_statistics_ms": 1e3 * statistics.median(d.inner.statistics for d in of_kind),
            }
            figures.append(row)
            print(
                f"{method:>8} {steps:>6} {batch:>6} {kind:>6} {row['dispatches']:>11} "
                f"{row['passes_per_dispatch']:>12g} {row['dispatch_ms']:>12.2f} {row['model_ms']:>9.2f} "
                f"{row['overhead_ms']:>12.2f} {row['overhead_per_pass_ms']:>12.2f} {row['token_statistics_ms']:>14.2f}"
            )
    if options.output:
        settings = {k: v for k, v in vars(options).items() if k != "output"}
        options.output.write_text(json.dumps({"machine": machine(), **settings, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
