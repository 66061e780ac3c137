"""Cost of ``batch_invariant``, and what differs without it: CPU seconds and log-probabilities at batch 1, 8 and 64.

OMP_NUM_THREADS=1 python benchmarks/batch_invariance.py --output benchmarks/results/batch_invariance_cpu.json

Random weights of one shape, the same 64 requests each time; medians over rounds that take turns between the modes.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from random_engine import machine, random_llada, runner_of

from dllm_engine import LLM, DiffusionParams

BATCHES = (1, 8, 64)
REQUESTS = 64
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_layers": 4,
    "num_heads": 4,
    "vocab_size": 8192,
    "max_model_len": 128,
    "max_num_seqs": 64,
}


def engine(dtype: str, cache_method: str, batch_invariant: bool) -> LLM:
    """With weights of a trained model's size; vLLM's dummy ones are so small that every token is as likely."""
    llm = random_llada(**SHAPE, dtype=dtype, cache_method=cache_method, batch_invariant=batch_invariant)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in runner_of(llm).model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.1)
    return llm


def answer(llm: LLM, prompts: list[list[int]], batch: int) -> tuple[float, list[Any]]:
    """CPU seconds for all requests, ``batch`` at a time, and their tokens with log-probabilities."""
    params = DiffusionParams(gen_length=32, block_length=32, steps=8, logprobs=0, ignore_eos=True)
    start, found = time.process_time(), []
    for first in range(0, len(prompts), batch):
        asked = [{"prompt_token_ids": prompt} for prompt in prompts[first : first + batch]]
        for output in llm.generate(asked, params, use_tqdm=False):
            completion = output.outputs[0]
            found.append([(t, e[t].logprob) for t, e in zip(completion.token_ids, completion.logprobs, strict=True)])
    return time.process_time() - start, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--cache-method", default="sparse")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 8000, (96 - i % 3,), generator=generator).tolist() for i in range(REQUESTS)]
    engines = {mode: engine(args.dtype, args.cache_method, mode) for mode in (False, True)}
    seconds: dict[tuple[bool, int], list[float]] = {(mode, batch): [] for mode in engines for batch in BATCHES}
    found = {}
    for round_number in range(args.rounds + 1):
        for mode, batch in seconds:
            took, found[mode, batch] = answer(engines[mode], prompts, batch)
            if round_number:  # the first warms up
                seconds[mode, batch].append(took)
    rows = [
        {
            "batch_invariant": mode,
            "batch": batch,
            "cpu_seconds": statistics.median(took),
            "requests_with_other_tokens_than_alone": _differ(found[mode, batch], found[mode, 1], 0),
            "requests_with_other_logprobs_than_alone": _differ(found[mode, batch], found[mode, 1], 1),
        }
        for (mode, batch), took in seconds.items()
    ]
    report = {
        "machine": machine(),
        "dtype": args.dtype,
        "shape": SHAPE,
        "cache_method": args.cache_method,
        "requests": REQUESTS,
        "rounds": args.rounds,
        "rows": rows,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")


def _differ(found: list[Any], alone: list[Any], part: int) -> int:
    """Requests whose tokens (part 0) or log-probabilities (part 1) are not those of batch 1."""
    return sum([x[part] for x in a] != [x[part] for x in b] for a, b in zip(found, alone, strict=True))


if __name__ == "__main__":
    main()
