"""Peak memory of a FULL step with a large vocabulary, against what logits of the whole canvas would take.

    python benchmarks/step_memory.py [--canvas 512 1024 2048] [--vocab-size 126464]

The peak is the process's high-water mark over one step (Linux resets it on request), less what it held before.
"""

import argparse

from random_engine import random_llada

from dllm_engine import LLM, DiffusionParams
from dllm_engine.bench.machine import machine
from dllm_engine.bench.memory import MIB, peak, restart_peak


def peak_of_step(llm: LLM, canvas: int) -> int:
    """Bytes that one step holds at most beyond what was held before it."""
    engine = llm.llm_engine
    gen_length = canvas // 2
    params = DiffusionParams(gen_length=gen_length, block_length=32, ignore_eos=True)
    engine.add_request(str(canvas), {"prompt_token_ids": [1] * (canvas - gen_length)}, params)
    engine.step()
    before = restart_peak()
    engine.step()
    taken = peak() - before
    engine.abort_request([str(canvas)])
    while engine.has_unfinished_requests():
        engine.step()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--canvas", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--vocab-size", type=int, default=126_464)
    parser.add_argument("--hidden-size", type=int, default=256)
    options = parser.parse_args()
    llm = random_llada(
        hidden_size=options.hidden_size,
        num_layers=2,
        num_heads=8,
        vocab_size=options.vocab_size,
        max_model_len=max(options.canvas),
        dtype="float32",
        max_num_seqs=1,
    )
    print(machine())
    print(f"{'canvas':>7} {'step peak MiB':>14} {'float32 logits of the canvas MiB':>33}")
    for canvas in options.canvas:
        logits = canvas * options.vocab_size * 4
        print(f"{canvas:>7} {peak_of_step(llm, canvas) / MIB:>14.0f} {logits / MIB:>33.0f}")


if __name__ == "__main__":
    main()
