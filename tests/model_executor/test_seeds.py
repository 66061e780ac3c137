"""Random sampling through the engine: a seed decides, nothing else does."""

import pytest

from dllm_engine import DiffusionParams
from tests.support.engines import generate

PROMPT = [3, 1, 4, 1, 5, 9]
OTHERS = [[k, k + 1, *range(2, 2 + 3 * k)] for k in range(7)]
SAMPLED = {"gen_length": 24, "block_length": 8, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module", params=["llada", "dream"])
def llm(request, engines, tiny_llada, tiny_dream):
    return engines(tiny_llada if request.param == "llada" else tiny_dream)


def sample(llm, prompts, **settings) -> list[list[int]]:
    outputs = generate(llm, prompts, DiffusionParams(**(SAMPLED | settings)))
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("unmasking", [None, "random", "origin", "topk_margin"])
def test_same_seed_gives_the_same_tokens_alone_and_in_a_batch(llm, unmasking):
    (alone,) = sample(llm, [PROMPT], seed=11, unmasking=unmasking)
    batch = sample(llm, [*OTHERS[:4], PROMPT, *OTHERS[4:]], seed=11, unmasking=unmasking)
    assert len(batch) == 8
    assert batch[4] == alone


def test_different_seeds_give_different_tokens(llm):
    responses = [tuple(sample(llm, [PROMPT], seed=seed)[0]) for seed in (0, 1, 2, -1, 2**63 - 1)]
    assert len(set(responses)) == 5


def test_samples_of_one_request_differ(llm):
    samples = sample(llm, [PROMPT], n=3, seed=4)
    assert len(samples) == 3
    assert len(set(map(tuple, samples))) == 3
    assert sample(llm, [PROMPT], n=3, seed=4) == samples


def test_requests_without_a_seed_differ(llm):
    assert len(set(map(tuple, sample(llm, [PROMPT] * 3)))) == 3


def test_greedy_ignores_the_seed(llm):
    assert sample(llm, [PROMPT], temperature=0.0, seed=1) == sample(llm, [PROMPT], temperature=0.0, seed=2)
