"""Answer a batch of prompts with Sparse-dLLM's cache and without a cache, and compare
what that takes.

python examples/offline_sparse.py
python examples/offline_sparse.py --retention-ratio 0.25
python examples/offline_sparse.py --model GSAI-ML/LLaDA-8B-Instruct --gen-length 128
--block-length 32

The demo model is so small that much of a step is spent around it: the gain in time is
smaller than that in tokens computed. Figures are sums over the requests of the batch,
which share their forward passes.
"""

import argparse
import os
import time

# Read when vLLM is imported: one process instead of three starts sooner, and only
# errors are logged.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from dllm_engine import LLM, DiffusionParams
from dllm_engine.demo.tasks import make_examples

FIGURES = {
    "forward passes": "forward_passes",
    "tokens computed": "tokens_computed",
    "pages held": "pages_held",  # the most that each request held at any time
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="demo",
        help="folder or Hugging Face name (default: %(default)s)",
    )
    parser.add_argument(
        "--gen-length",
        type=int,
        default=32,
        help="response tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--block-length",
        type=int,
        default=8,
        help="denoised together (default: %(default)s)",
    )
    parser.add_argument(
        "--retention-ratio",
        type=float,
        default=0.5,
        help="share retained (default: %(default)s)",
    )
    args = parser.parse_args()

    examples = [
        example
        for task in ("names", "facts")
        for example in make_examples(
            task, 4, seed=1, pairs=(12, 16), filler=0.3, asked=2
        )
    ]
    conversations = [
        [{"role": "user", "content": example.prompt}] for example in examples
    ]
    params = DiffusionParams(gen_length=args.gen_length, block_length=args.block_length)

    sparse = LLM(
        args.model,
        cache_method="sparse",
        cache_options={"retention_ratio": args.retention_ratio},
    )
    none = LLM(args.model, cache_method="none")
    texts, columns = {}, {}
    for name, llm in (("sparse", sparse), ("none", none)):
        llm.chat(
            conversations, params, use_tqdm=False
        )  # the first time, an engine also warms up
        start = time.perf_counter()
        completions = [
            output.outputs[0]
            for output in llm.chat(conversations, params, use_tqdm=False)
        ]
        seconds = time.perf_counter() - start
        figures = [completion.diffusion for completion in completions]
        texts[name] = [completion.text.strip() for completion in completions]
        columns[name] = {
            "tokens/s": f"{sum(each.tokens_unmasked for each in figures) / seconds:,.0f}"
        }
        for label, field in FIGURES.items():
            columns[name][label] = f"{sum(getattr(each, field) for each in figures):,}"

    for example, text, uncached in zip(
        examples, texts["sparse"], texts["none"], strict=True
    ):
        print(f"… {example.prompt[-60:]}\n  → {text}")
        if text != uncached:
            print(f"    without a cache: {uncached}")
    print(f"\n{'':16}{'sparse':>10}{'none':>10}")
    for label, figure in columns["sparse"].items():
        print(f"{label:16}{figure:>10}{columns['none'][label]:>10}")


if __name__ == "__main__":
    main()
