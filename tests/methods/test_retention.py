"""What ``sparse`` and ``maskkv`` retain: scorers, and budgets of layers and heads."""

import itertools
import random
from typing import Any

import pytest
import torch

from dllm_engine.model_executor.retention.head_budgets import HEAD_BUDGETS
from dllm_engine.scheduler.methods.layer_budgets import LAYER_BUDGETS, layer_budgets
from tests.oracles.maskkv import importance, pooled, votes_of
from tests.oracles.models import PlainModel
from tests.support.answers import answers

MODELS = ["llada-tiny-a", "dream-tiny-a"]
SCORERS = ["mean_query", "mask_voting", "all_voting", "prompt_voting", "snapkv", "random"]
EVEN = {"kv_budget": 12, "layer_budget": "uniform", "head_budget": "uniform"}
PROMPT = [random.Random(37 + i).randrange(480) for i in range(37)]


@pytest.fixture
def ask(engines, reference_checkpoints):
    def answer(method: str, model: str = MODELS[0], *, asked=None, **options: Any):
        fields = {"gen_length": 24, "block_length": 8, "seed": 0} | (asked or {})
        llm = engines.shared(
            reference_checkpoints / model, page_size=8, max_model_len=128, cache_method=method, cache_options=options
        )
        return answers(llm, [(PROMPT, fields)])[0]

    return answer


# Scorers


@pytest.mark.parametrize(("method", "options"), [("sparse", {"retention_ratio": 0.4}), ("maskkv", EVEN)])
def test_random_retention_follows_the_seed(ask, method, options):
    name = "retained_positions" if method == "sparse" else "retained_per_head"
    first, again, other = (
        ask(method, scorer="random", asked={"seed": seed}, **options).traces[name] for seed in (1, 1, 2)
    )
    assert first == again != other
    if method == "maskkv":
        flat = [tuple(positions) for layer in first[0] for positions in layer]
        assert len(set(flat)) == len(flat), "layers and heads draw their own"


def votes_by_layer(model: PlainModel, canvas: list[int], voters: list[int]) -> list[torch.Tensor]:
    """In a forward pass without a cache, averaged over heads: ``[canvas]``."""
    x, found = model.embed(canvas), []
    for layer in model.layers:
        q, k, v = model.qkv(layer, x, range(len(canvas)))
        found.append(votes_of(q[voters], k, len(canvas)).mean(0))
        x = x + model.attention(layer, q, k, v)
        x = x + model.mlp(layer, x)
    return found


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("scorer", "voters"),
    # In the first step, without a delay, all of the response is masked.
    [
        ("mask_voting", range(37, 61)),
        ("snapkv", range(37 - 6, 37)),
        ("all_voting", range(61)),
        ("prompt_voting", range(37)),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_votes_are_those_of_plain_attention(ask, reference_checkpoints, name, scorer, voters, width):
    model = PlainModel(reference_checkpoints / name)
    options = {"update_delay": 0, "pool_kernel_size": width, "observation_window": 6, "retention_ratio": 0.4}
    retained_by_layer = ask("sparse", name, scorer=scorer, **options).traces["retained_positions"][0]
    outside = [*range(37), *range(45, 61)]
    votes = votes_by_layer(model, PROMPT + [model.mask] * 24, list(voters))
    for of_layer, retained in zip(votes, retained_by_layer, strict=True):
        scores = dict(zip(outside, pooled(of_layer[None, outside], width)[0].tolist(), strict=True))
        best = sorted(scores.values(), reverse=True)[: int(53 * 0.4)]
        # Pooling makes neighbours equal, also where the best end: the scores tell, not the positions.
        assert sorted((scores[position] for position in retained), reverse=True) == pytest.approx(best, rel=1e-4)
        if width == 1:
            assert set(retained) == {position for position in outside if scores[position] >= best[-1] * (1 - 1e-6)}


# Budgets of layers and heads


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize(("model", "heads"), [("llada-tiny-a", 4), ("dream-tiny-a", 2)])
def test_every_combination_keeps_to_its_budget(ask, reference_checkpoints, model, heads, scorer):
    plain = PlainModel(reference_checkpoints / model)
    canvas = PROMPT + [plain.mask] * 8
    measured = {kind: importance(plain, canvas, of_attention=kind == "squeeze") for kind in LAYER_BUDGETS}
    for layer_budget, head_budget in itertools.product(LAYER_BUDGETS, HEAD_BUDGETS):
        chosen = {"layer_budget": layer_budget, "head_budget": head_budget}
        asked = {"gen_length": 8, "steps": 1}
        answer = ask("maskkv", model, kv_budget=12, scorer=scorer, asked=asked, **chosen)
        (retained,) = answer.traces["retained_per_head"]
        budgets = layer_budgets(layer_budget, 12, measured[layer_budget], 37, base_share=0.4)
        assert 44 <= sum(budgets) <= 48, chosen
        for heads_of_layer, budget in zip(retained, budgets, strict=True):
            layer = list(map(len, heads_of_layer))
            assert len(layer) == heads
            assert sum(layer) <= budget * heads, chosen
            assert sum(layer) > (budget - 1) * heads, "only rounding loses tokens where no head is at its cap"
            assert len(set(layer)) == 1 or head_budget != "uniform"
        for positions in itertools.chain(*retained):
            assert positions == sorted(set(positions))
            assert set(positions) <= set(range(37))
