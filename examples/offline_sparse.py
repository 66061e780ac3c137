"""Answer a batch of prompts with Sparse-dLLM's cache and without a cache, and compare
what that takes.

python examples/offline_sparse.py

The demo model is so small that much of a step is spent around it: the gain in time is
smaller than that in tokens computed. Figures are sums over the requests of the batch,
which share their forward passes.
"""

import time
from typing import Any

from dllm_engine import LLM, DiffusionParams
from dllm_engine.demo.tasks import make_examples

MODEL = "demo"
"""A folder or Hugging Face name, such as ``GSAI-ML/LLaDA-8B-Instruct``."""
CACHES: dict[str, dict[str, Any]] = {
    "sparse": {"retention_ratio": 0.5},  # the share of tokens that stays
    "none": {},
}
PARAMS = DiffusionParams(gen_length=32, block_length=8)
# Prompts with facts that nobody asks about.
PROMPTS = [
    example.prompt
    for task in ("names", "facts")
    for example in make_examples(task, 4, seed=1, pairs=(12, 16), filler=0.3, asked=2)
]


def main() -> None:
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for method, options in CACHES.items():
        llm = LLM(MODEL, cache_method=method, cache_options=options)
        llm.chat(chats, PARAMS, use_tqdm=False)  # an engine also warms up
        start = time.perf_counter()
        outputs = llm.chat(chats, PARAMS, use_tqdm=False)
        seconds = time.perf_counter() - start
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            print(f"… {prompt[-60:]}\n  → {output.outputs[0].text.strip()}")
        figures = [output.outputs[0].diffusion for output in outputs]
        num_tokens = sum(each.tokens_unmasked for each in figures)
        print(
            f"{method}: {num_tokens / seconds:,.0f} tokens/s,",
            f"{sum(each.tokens_computed for each in figures):,} tokens computed,",
            f"{sum(each.pages_held for each in figures):,} pages held at most\n",
        )


if __name__ == "__main__":
    main()
