"""``batch_invariant``: not a bit of a response depends on what else is running."""

from typing import Any

import pytest
import torch

from dllm_engine import DiffusionParams
from tests.support.engines import generate, runner_of

# Methods of each kind of layer pass; sampling and parallel unmasking.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(("llada", method, {}) for method in ("none", "sparse", "dllm_cache", "es_dllm")),
    ("dream", "dkv", {}),
    ("llada", "sparse", {"temperature": 1.0}),
    ("llada", "sparse", {"threshold": 0.02}),
    ("llada", "sparse", {"entropy_bound": 5.0, "top_p": 0.9}),
]


def prompts(count: int) -> list[list[int]]:
    """Some of equal length, some not."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 140, (20 + 3 * (i % 5),), generator=generator).tolist()
        for i in range(count)
    ]


def answers(llm, batch_size: int, count: int, **params):
    """(tokens, their log-probabilities to the last bit) of ``count`` requests,
    ``batch_size`` at a time.
    """
    settings = {
        "gen_length": 8,
        "block_length": 4,
        "steps": 4,
        "logprobs": 0,
        "ignore_eos": True,
    } | params
    found = []
    for start in range(0, count, batch_size):
        batch = prompts(64)[start : start + batch_size]
        wanted = [
            DiffusionParams(**settings, seed=start + i) for i in range(len(batch))
        ]
        for output in generate(llm, batch, wanted):
            completion = output.outputs[0]
            tokens = list(completion.token_ids)
            logprobs = [
                entry[token].logprob
                for entry, token in zip(completion.logprobs, tokens, strict=True)
            ]
            found.append((tokens, logprobs))
    return found


def let_rows_matter(llm, monkeypatch):
    """As in a library that sums otherwise for other shapes, only more so, on any
    machine.
    """
    embedding = runner_of(llm).model.embedding
    embed = embedding.forward
    monkeypatch.setattr(embedding, "forward", lambda ids: embed(ids) + 1e-3 * len(ids))


@pytest.mark.parametrize(("family", "method", "params"), CASES)
def test_responses_are_identical_at_any_batch(
    engines, tiny_llada, tiny_dream, monkeypatch, family, method, params
):
    checkpoint = tiny_llada if family == "llada" else tiny_dream
    llm = engines(checkpoint, cache_method=method, batch_invariant=True, trace=False)
    let_rows_matter(llm, monkeypatch)
    together = answers(llm, 32, 32, **params)
    assert answers(llm, 8, 16, **params) == together[:16]
    assert answers(llm, 1, 4, **params) == together[:4]


def test_nor_do_chunks_prefixes_and_preemption_of_block_models(
    engines, tiny_sdar, monkeypatch
):
    # Prompts of 20 to 32 tokens share 64 rows, and a pool of 84 pages.
    small = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "page_size": 4,
        "max_model_len": 64,
    }
    llm = engines(
        tiny_sdar,
        batch_invariant=True,
        trace=False,
        kv_cache_memory_bytes=1 << 17,
        **small,
    )
    of_blocks = {"steps": None, "steps_per_block": 2, "gen_length": 24}
    let_rows_matter(llm, monkeypatch)
    together = answers(llm, 16, 16, **of_blocks)
    assert answers(llm, 1, 16, **of_blocks) == together
    for _ in range(2):  # the second time, its beginning is in the pool
        assert answers(llm, 1, 1, **of_blocks) == together[:1]
