"""Sampling against a plain implementation.

Greedy decoding is in ``tests/methods/test_random_requests.py``.
"""

import random

import pytest

from tests.oracles.decode import decode
from tests.oracles.decoding import Decoding
from tests.oracles.models import PlainModel
from tests.support import tiny_checkpoints
from tests.support.answers import answers
from tests.support.random_requests import noise_of, random_automaton

PROMPTS = [
    [(7 * i * i + 3 * i * k + 11 * k) % 140 for i in range(length)]
    for k, length in enumerate([8, 1, 15, 5, 23, 8, 31, 2])
]
MARGIN = 1e-4
"""A decision closer than this is left to rounding and proves nothing."""


SAMPLED_SETTINGS = {
    "llada": {"gen_length": 18, "block_length": 8, "steps": 14, "unmasking": "low_confidence", "temperature": 1.0},
    "llada, cool": {"gen_length": 9, "block_length": 9, "steps": 6, "unmasking": "low_confidence", "temperature": 0.4},
    "dream": {"gen_length": 16, "block_length": 16, "steps": 9, "unmasking": "maskgit_plus", "temperature": 0.7},
    "dream, blocks": {"gen_length": 18, "block_length": 8, "steps": 14, "unmasking": "entropy", "temperature": 1.3},
    "dream, filters": {
        "gen_length": 10, "block_length": 10, "steps": 8, "unmasking": "topk_margin", "temperature": 0.8, "top_p": 0.8,
        "top_k": 7,
    },
    "llada, random": {"gen_length": 18, "block_length": 8, "steps": 10, "unmasking": "random", "temperature": 1.0},
    "dream, origin": {"gen_length": 16, "block_length": 16, "steps": 9, "unmasking": "origin", "temperature": 0.7},
    "sdar": {"gen_length": 18, "block_length": 8, "steps_per_block": 3, "temperature": 1.0},
    "illada": {"gen_length": 18, "block_length": 8, "steps": 14, "temperature": 1.0},
    "dream_reasoner": {"gen_length": 18, "block_length": 8, "steps_per_block": 5, "temperature": 1.0},
    "stable_diffcoder": {"gen_length": 18, "block_length": 8, "steps_per_block": 3, "temperature": 1.0},
    "sdar, filters": {
        "gen_length": 10, "block_length": 4, "threshold": 0.5, "temperature": 0.8, "top_p": 0.9, "top_k": 7,
    },
}  # fmt: skip


CONSTRAINT = random_automaton(random.Random(0), tiny_checkpoints.VOCAB_SIZE, {tiny_checkpoints.MASK})


@pytest.mark.parametrize("constraint", [{}, {"constraint": CONSTRAINT.packed}], ids=["free", "constrained"])
@pytest.mark.parametrize("name", SAMPLED_SETTINGS)
def test_sampling(engines, request, name, constraint):
    """Two prompts of different lengths in one batch: tokens and order."""
    folder = request.getfixturevalue({"dream, filters": "unsure_dream"}.get(name, f"tiny_{name.split(',')[0]}"))
    settings, expected = SAMPLED_SETTINGS[name] | constraint | {"seed": 17}, dict[int, Decoding]()
    tokens, order = noise_of(17, tiny_checkpoints.VOCAB_SIZE)
    for prompt in PROMPTS:
        if len(prompt) not in expected and len(expected) < 2:
            run = decode(PlainModel(folder), prompt, **settings, uniform=tokens, order_noise=order)
            if run.closest > MARGIN:
                expected[len(prompt)] = run
    assert len(expected) == 2, "these weights leave every prompt to rounding; choose another seed"
    found = answers(engines(folder), [(run.prompt, settings) for run in expected.values()])
    for run, answer in zip(expected.values(), found, strict=True):
        assert (answer.tokens, answer.order) == (run.tokens, run.order)


@pytest.fixture(scope="module")
def unsure_dream(tmp_path_factory):
    """Spreads its probability over many tokens, so that top-p and top-k cut something off."""
    return tiny_checkpoints.write_dream(tmp_path_factory.mktemp("unsure"), head_scale=1.0, seed=2)
