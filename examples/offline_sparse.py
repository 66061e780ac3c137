"""Answer a batch of prompts with Sparse-dLLM's cache and without a cache, and compare what that takes.

python examples/offline_sparse.py
python examples/offline_sparse.py --retention-ratio 0.25
python examples/offline_sparse.py --model GSAI-ML/LLaDA-8B-Instruct --gen-length 128 --block-length 32

The demo model is so small that much of a step is spent around it: the gain in time is smaller than that in tokens
computed. Figures are sums over the requests of the batch, which share their forward passes.
"""

import argparse
import os
import time
from dataclasses import dataclass

# Read when vLLM is imported: the scheduler must run in this process for its pages to be looked at.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from dllm_engine import LLM, DiffusionParams
from dllm_engine.demo.tasks import make_examples


@dataclass
class Run:
    """The batch under one cache method."""

    texts: list[str]
    seconds: float
    tokens: int
    forward_passes: int
    tokens_computed: int
    pages_held: int
    """The most at any time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="folder or Hugging Face name (default: %(default)s)")
    parser.add_argument("--gen-length", type=int, default=32, help="response tokens (default: %(default)s)")
    parser.add_argument("--block-length", type=int, default=8, help="denoised together (default: %(default)s)")
    parser.add_argument("--retention-ratio", type=float, default=0.5, help="share retained (default: %(default)s)")
    args = parser.parse_args()

    examples = [
        example
        for task in ("names", "facts")
        for example in make_examples(task, 4, seed=1, min_pairs=12, max_pairs=16, filler=0.3, asked=2)
    ]
    conversations = [[{"role": "user", "content": example.prompt}] for example in examples]
    params = DiffusionParams(gen_length=args.gen_length, block_length=args.block_length)

    sparse = LLM(args.model, cache_method="sparse", cache_options={"retention_ratio": args.retention_ratio})
    none = LLM(args.model, cache_method="none")
    runs = {}
    for name, llm in (("sparse", sparse), ("none", none)):
        answer(llm, conversations, params)  # the first time, an engine also warms up
        runs[name] = answer(llm, conversations, params)

    for example, text, uncached in zip(examples, runs["sparse"].texts, runs["none"].texts, strict=True):
        print(f"… {example.prompt[-60:]}\n  → {text}")
        if text != uncached:
            print(f"    without a cache: {uncached}")
    print(f"\n{'':16}{'sparse':>10}{'none':>10}")
    for label, figure in (
        ("tokens/s", lambda run: f"{run.tokens / run.seconds:,.0f}"),
        ("forward passes", lambda run: f"{run.forward_passes:,}"),
        ("tokens computed", lambda run: f"{run.tokens_computed:,}"),
        ("pages held", lambda run: f"{run.pages_held:,}"),
    ):
        print(f"{label:16}{figure(runs['sparse']):>10}{figure(runs['none']):>10}")


def answer(llm: LLM, conversations: list, params: DiffusionParams) -> Run:
    """Answer all at once, looking at the pages after every step."""
    engine = llm.llm_engine
    pages = engine.engine_core.engine_core.scheduler.pages
    start = time.perf_counter()
    llm.enqueue_chat(conversations, params, use_tqdm=False)
    finished, pages_held = [], 0
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
        pages_held = max(pages_held, pages.num_allocated)
    seconds = time.perf_counter() - start
    finished.sort(key=lambda output: int(output.request_id))
    completions = [output.outputs[0] for output in finished]
    return Run(
        texts=[completion.text.strip() for completion in completions],
        seconds=seconds,
        tokens=sum(completion.diffusion.tokens_unmasked for completion in completions),
        forward_passes=sum(completion.diffusion.forward_passes for completion in completions),
        tokens_computed=sum(completion.diffusion.tokens_computed for completion in completions),
        pages_held=pages_held,
    )


if __name__ == "__main__":
    main()
