"""``alg_temp``: positions drawn as in Dream's sampler."""

import itertools
from collections import Counter

import pytest
import torch

from dllm_engine import DiffusionParams
from tests.oracles.models import PlainModel
from tests.support import tiny_checkpoints
from tests.support.engines import generate

PROMPT = [3, 1, 4, 1, 5, 9]
DRAWS = 600
LENGTH, FILLED = 4, 2


def confidences(folder, family: str) -> torch.Tensor:
    """Of the first pass: negative entropies for Dream, probabilities for LLaDA."""
    rows = PlainModel(folder).predictions(PROMPT + [tiny_checkpoints.MASK] * LENGTH)[len(PROMPT) :]
    p = rows.softmax(-1)
    return (p * (p + 1e-10).log()).sum(-1) if family == "dream" else p.max(-1).values


def chances(weights: list[float]) -> dict[tuple[int, ...], float]:
    """Of each set of ``FILLED`` positions, by ``torch.multinomial`` without replacement from ``weights``."""
    found: Counter[tuple[int, ...]] = Counter()
    for drawn in itertools.permutations(range(LENGTH), FILLED):
        left, chance = sum(weights), 1.0
        for position in drawn:
            chance *= weights[position] / left
            left -= weights[position]
        found[tuple(sorted(drawn))] += chance
    return dict(found)


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_they_are_draws_without_replacement_from_the_softmax(engines, request, family, spread):
    """Confidences over temperature, softmax, multinomial: the distribution of DreamLM's ``generation_utils.py``."""
    folder = request.getfixturevalue(f"tiny_{family}")
    measured = confidences(folder, family).double()
    temperature = float(measured.max() - measured.min()) * spread
    asked = {"gen_length": LENGTH, "tokens_per_step": FILLED, "ignore_eos": True, "alg_temp": temperature}
    params = [DiffusionParams(**asked, seed=seed) for seed in range(DRAWS)]
    outputs = generate(engines(folder), [PROMPT] * DRAWS, params)
    first = (output.outputs[0].diffusion.unmasked_per_step[0] for output in outputs)
    found = Counter(tuple(position - len(PROMPT) for position in positions) for positions in first)
    expected = chances((measured / temperature).softmax(-1).tolist())
    assert found.keys() <= expected.keys()
    for positions, chance in expected.items():
        deviation = (chance * (1 - chance) / DRAWS) ** 0.5
        assert abs(found[positions] / DRAWS - chance) < 4 * deviation, positions
