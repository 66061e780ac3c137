"""Decoding on random checkpoints: the engine against a plain implementation, in settings the reference cases lack."""

import random

import pytest
import torch

from tests.oracles.decode import decode
from tests.oracles.decoding import Decoding, Uniform
from tests.oracles.models import PlainModel
from tests.support import tiny_checkpoints
from tests.support.answers import answers
from tests.support.random_requests import random_automaton

PROMPTS = [
    [(7 * i * i + 3 * i * k + 11 * k) % 140 for i in range(length)]
    for k, length in enumerate([8, 1, 15, 5, 23, 8, 31, 2])
]
MARGIN = 1e-4
"""A decision closer than this is left to rounding and proves nothing."""

LLADA_SETTINGS = {
    "last block shorter": {"gen_length": 21, "block_length": 8, "steps": 21},
    "steps do not divide by the blocks": {"gen_length": 32, "block_length": 8, "steps": 18},
    "last block shorter, uneven steps": {"gen_length": 27, "block_length": 10, "steps": 13},
    "last block of one token": {"gen_length": 17, "block_length": 4, "steps": 17},
    "one step per block": {"gen_length": 24, "block_length": 8, "steps": 3},
    "short last block, a step for all of it": {"gen_length": 19, "block_length": 8, "steps": 6},
    "one block": {"gen_length": 24, "block_length": 24, "steps": 7},
    "one token per block": {"gen_length": 6, "block_length": 1, "steps": 6},
    "one token": {"gen_length": 1, "block_length": 1, "steps": 1},
}
DREAM_SETTINGS = {
    "entropy": {"gen_length": 24, "block_length": 24, "steps": 24, "unmasking": "entropy"},
    "odd steps": {"gen_length": 20, "block_length": 20, "steps": 7, "unmasking": "maskgit_plus"},
    "one step": {"gen_length": 16, "block_length": 16, "steps": 1, "unmasking": "entropy"},
    "blocks, short last, fewer steps": {"gen_length": 19, "block_length": 8, "steps": 11, "unmasking": "topk_margin"},
    "blocks": {"gen_length": 24, "block_length": 8, "steps": 24, "unmasking": "entropy"},
    "blocks, uneven steps": {"gen_length": 24, "block_length": 8, "steps": 17, "unmasking": "maskgit_plus"},
    "blocks, last shorter": {"gen_length": 21, "block_length": 8, "steps": 21, "unmasking": "topk_margin"},
    "blocks, two steps each": {"gen_length": 24, "block_length": 8, "steps": 6, "unmasking": "entropy"},
    "blocks, one step each": {"gen_length": 24, "block_length": 8, "steps": 3, "unmasking": "entropy"},
    "blocks, one and two steps": {"gen_length": 24, "block_length": 8, "steps": 5, "unmasking": "entropy"},
    "top_p": {"gen_length": 10, "block_length": 10, "steps": 8, "unmasking": "entropy", "top_p": 0.8},
    "top_k": {"gen_length": 24, "block_length": 24, "steps": 12, "unmasking": "maskgit_plus", "top_k": 5},
    "top_p and top_k": {
        "gen_length": 10, "block_length": 10, "steps": 8, "unmasking": "topk_margin", "top_p": 0.9, "top_k": 7,
    },
    "blocks, top_p": {"gen_length": 24, "block_length": 8, "steps": 16, "unmasking": "maskgit_plus", "top_p": 0.7},
}  # fmt: skip


SAMPLED_SETTINGS = {
    "llada": {"gen_length": 18, "block_length": 8, "steps": 14, "unmasking": "low_confidence", "temperature": 1.0},
    "llada, cool": {"gen_length": 9, "block_length": 9, "steps": 6, "unmasking": "low_confidence", "temperature": 0.4},
    "dream": {"gen_length": 16, "block_length": 16, "steps": 9, "unmasking": "maskgit_plus", "temperature": 0.7},
    "dream, blocks": {"gen_length": 18, "block_length": 8, "steps": 14, "unmasking": "entropy", "temperature": 1.3},
    "dream, filters": {
        "gen_length": 10, "block_length": 10, "steps": 8, "unmasking": "topk_margin", "temperature": 0.8, "top_p": 0.8,
        "top_k": 7,
    },
    "sdar": {"gen_length": 18, "block_length": 8, "steps_per_block": 3, "temperature": 1.0},
    "sdar, filters": {
        "gen_length": 10, "block_length": 4, "threshold": 0.5, "temperature": 0.8, "top_p": 0.9, "top_k": 7,
    },
}  # fmt: skip


BLOCK_SETTINGS = {
    "a step per token": {"gen_length": 18, "block_length": 4},
    "longer blocks, uneven steps": {"gen_length": 21, "block_length": 8, "steps_per_block": 3},
    "threshold": {"gen_length": 19, "block_length": 4, "threshold": 0.3},
}


CONSTRAINT = random_automaton(random.Random(0), tiny_checkpoints.VOCAB_SIZE, {tiny_checkpoints.MASK})


def assert_decodes_like_the_plain_model(
    llm, folder, settings, seed: int | None = None, cache_method: str = "none"
) -> None:
    """Two prompts of different lengths in one batch: tokens, order and number of forward passes."""
    plain, uniform = PlainModel(folder), None if seed is None else uniform_of(seed)
    expected: dict[int, Decoding] = {}
    for prompt in PROMPTS:
        if len(prompt) not in expected and len(expected) < 2:
            run = decode(plain, prompt, cache_method, **settings, uniform=uniform)
            if run.closest > MARGIN:
                expected[len(prompt)] = run
    assert len(expected) == 2, "these weights leave every prompt to rounding; choose another seed"
    found = answers(llm, [(run.prompt, settings | {"seed": seed}) for run in expected.values()])
    for run, answer in zip(expected.values(), found, strict=True):
        assert (answer.tokens, answer.order) == (run.tokens, run.order)


def uniform_of(seed: int) -> Uniform:
    """The engine's random numbers of a request; their own tests hold them to plain arithmetic."""
    from dllm_engine.kernels.noise import uniform

    def draw(forward: int, position: int) -> torch.Tensor:
        counters = (torch.tensor(value) for value in (seed, forward, position))
        return uniform(*counters, torch.arange(tiny_checkpoints.VOCAB_SIZE))

    return draw


@pytest.mark.parametrize("constraint", [{}, {"constraint": CONSTRAINT.packed}], ids=["free", "constrained"])
@pytest.mark.parametrize("name", SAMPLED_SETTINGS)
def test_sampling(engines, tiny_llada, tiny_dream, unsure_dream, tiny_sdar, name, constraint):
    folders = {"llada": tiny_llada, "dream": tiny_dream, "sdar": tiny_sdar, "dream, filters": unsure_dream}
    folder = folders.get(name) or folders[name.split(",")[0]]
    assert_decodes_like_the_plain_model(engines(folder), folder, SAMPLED_SETTINGS[name] | constraint, seed=17)


@pytest.mark.parametrize("name", LLADA_SETTINGS)
def test_llada(engines, tiny_llada, name):
    settings = LLADA_SETTINGS[name] | {"unmasking": "low_confidence"}
    assert_decodes_like_the_plain_model(engines(tiny_llada), tiny_llada, settings)


@pytest.fixture(scope="module")
def unsure_dream(tmp_path_factory):
    """Spreads its probability over many tokens, so that top-p and top-k cut something off."""
    return tiny_checkpoints.write_dream(tmp_path_factory.mktemp("unsure"), head_scale=1.0, seed=2)


@pytest.mark.parametrize("name", DREAM_SETTINGS)
def test_dream(engines, tiny_dream, unsure_dream, name):
    folder = unsure_dream if "top_" in name else tiny_dream
    assert_decodes_like_the_plain_model(engines(folder), folder, DREAM_SETTINGS[name])


@pytest.mark.parametrize("cache_method", ["block", "none"])
@pytest.mark.parametrize("name", BLOCK_SETTINGS)
def test_sdar_moe(engines, tiny_sdar_moe, name, cache_method):
    llm, settings = engines(tiny_sdar_moe, cache_method=cache_method), BLOCK_SETTINGS[name]
    assert_decodes_like_the_plain_model(llm, tiny_sdar_moe, settings, cache_method=cache_method)
    requests = [(prompt, settings) for prompt in PROMPTS]
    assert answers(llm, requests) == [answers(llm, [request])[0] for request in requests], "alone and in a batch"


@pytest.mark.parametrize(
    "config", [{"n_kv_heads": 2}, {"n_kv_heads": 1}, {"weight_tying": True}, {"include_qkv_bias": True}], ids=str
)
def test_llada_layouts(engines, tmp_path, config):
    folder = tiny_checkpoints.write_llada(tmp_path, seed=5, **config)
    settings = {"gen_length": 18, "block_length": 8, "steps": 14, "unmasking": "low_confidence"}
    assert_decodes_like_the_plain_model(engines(folder), folder, settings)


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"num_key_value_heads": 4}], ids=str)
def test_dream_layouts(engines, tmp_path, config):
    folder = tiny_checkpoints.write_dream(tmp_path, seed=5, **config)
    settings = {"gen_length": 18, "block_length": 8, "steps": 14, "unmasking": "entropy"}
    assert_decodes_like_the_plain_model(engines(folder), folder, settings)


def test_each_family_can_use_the_other_ones_policy(engines, tiny_llada, tiny_dream):
    """A policy is independent of the model: the schedule stays the family's."""
    settings = {"gen_length": 18, "block_length": 9, "steps": 12}
    assert_decodes_like_the_plain_model(engines(tiny_llada), tiny_llada, settings | {"unmasking": "topk_margin"})
    assert_decodes_like_the_plain_model(engines(tiny_dream), tiny_dream, settings | {"unmasking": "low_confidence"})


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_settings_left_out_are_the_familys(engines, tiny_llada, tiny_dream, family):
    folder = tiny_llada if family == "llada" else tiny_dream
    named = {
        "llada": {"block_length": 32, "unmasking": "low_confidence"},
        "dream": {"block_length": 40, "unmasking": "entropy"},
    }[family]
    llm, length = engines(folder), {"gen_length": 40}
    assert answers(llm, [(PROMPTS[0], length)]) == answers(llm, [(PROMPTS[0], length | named | {"steps": 40})])


@pytest.mark.parametrize("gen_length", [33, 40, 65])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_steps_left_open_are_one_per_token_whatever_the_length(engines, tiny_llada, tiny_dream, family, gen_length):
    llm = engines(tiny_llada if family == "llada" else tiny_dream)
    (answer,) = answers(llm, [(PROMPTS[0], {"gen_length": gen_length, "block_length": 32})])
    assert len(answer.order) == gen_length
    if family == "llada":
        assert [len(step) for step in answer.order] == [1] * gen_length
