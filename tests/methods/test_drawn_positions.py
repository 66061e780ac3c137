"""``alg_temp``: positions drawn as in Dream's sampler, by random numbers of the seed alone."""

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


def asked(temperature: float, seed: int) -> DiffusionParams:
    return DiffusionParams(gen_length=LENGTH, tokens_per_step=FILLED, ignore_eos=True, alg_temp=temperature, seed=seed)


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_they_are_draws_without_replacement_from_the_softmax(engines, request, family, spread):
    """Confidences over temperature, softmax, multinomial: the distribution of DreamLM's ``generation_utils.py``."""
    folder = request.getfixturevalue(f"tiny_{family}")
    measured = confidences(folder, family).double()
    temperature = float(measured.max() - measured.min()) * spread
    outputs = generate(engines(folder), [PROMPT] * DRAWS, [asked(temperature, seed) for seed in range(DRAWS)])
    first = (output.outputs[0].diffusion.unmasked_per_step[0] for output in outputs)
    found = Counter(tuple(position - len(PROMPT) for position in positions) for positions in first)
    expected = chances((measured / temperature).softmax(-1).tolist())
    assert found.keys() <= expected.keys()
    for positions, chance in expected.items():
        deviation = (chance * (1 - chance) / DRAWS) ** 0.5
        assert abs(found[positions] / DRAWS - chance) < 4 * deviation, positions


def test_the_seed_decides_alone_and_in_a_batch(engines, tiny_dream):
    llm = engines(tiny_dream)
    params = [asked(0.5, seed) for seed in range(8)]
    together = generate(llm, [PROMPT] * 8, params)
    alone = [generate(llm, [PROMPT], each)[0] for each in params]
    orders = [[o.outputs[0].diffusion.unmasked_per_step for o in outputs] for outputs in (together, alone)]
    assert orders[0] == orders[1]
    assert len({str(order) for order in orders[0]}) > 1


def test_at_temperature_0_the_most_confident_are_filled(engines, tiny_dream):
    llm = engines(tiny_dream)
    settings = {"gen_length": 8, "ignore_eos": True}
    found = generate(llm, [PROMPT] * 2, [DiffusionParams(**settings, alg_temp=0.0), DiffusionParams(**settings)])
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids
