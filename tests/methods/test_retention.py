"""What ``sparse`` and ``maskkv`` retain: scorers, budgets of layers and heads, and less by request."""

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
QUARTERS = [f"mask_voting_{name}" for name in ("first", "second", "third", "last")]
EVEN = {"kv_budget": 12, "layer_budget": "uniform", "head_budget": "uniform"}
PROMPT = [random.Random(37 + i).randrange(480) for i in range(37)]


@pytest.fixture
def ask(engines, reference_checkpoints):
    def answer(method: str, model: str = MODELS[0], *, prompt=PROMPT, asked=None, **options: Any):
        fields = {"gen_length": 24, "block_length": 8, "seed": 0} | (asked or {})
        llm = engines.shared(
            reference_checkpoints / model, page_size=8, max_model_len=128, cache_method=method, cache_options=options
        )
        return answers(llm, [(prompt, fields)])[0]

    return answer


@pytest.fixture
def per_head(ask):
    """Prompt positions that MaskKV retains, per layer and KV head."""

    def retained(model: str = MODELS[0], **options: Any) -> list[list[list[int]]]:
        return ask("maskkv", model, **options).traces["retained_per_head"][0]

    return retained


def counts(retained: list[list[list[int]]]) -> list[list[int]]:
    return [[len(positions) for positions in layer] for layer in retained]


# Scorers


def test_scorers_disagree(ask, per_head):
    sparse = [ask("sparse", scorer=scorer, retention_ratio=0.4).traces["retained_positions"] for scorer in SCORERS]
    maskkv = [per_head(scorer=scorer, **EVEN) for scorer in [*SCORERS, *QUARTERS, "h2o"]]
    for retained in (sparse, maskkv):
        assert all(a != b for a, b in itertools.combinations(retained, 2))


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
    [("mask_voting", range(37, 61)), ("snapkv", range(37 - 6, 37))],
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
def test_every_combination_keeps_to_its_budget(per_head, reference_checkpoints, model, heads, scorer):
    plain = PlainModel(reference_checkpoints / model)
    canvas = PROMPT + [plain.mask] * 8
    measured = {kind: importance(plain, canvas, of_attention=kind == "squeeze") for kind in LAYER_BUDGETS}
    for layer_budget, head_budget in itertools.product(LAYER_BUDGETS, HEAD_BUDGETS):
        chosen = {"layer_budget": layer_budget, "head_budget": head_budget}
        retained = per_head(model, kv_budget=12, scorer=scorer, asked={"gen_length": 8, "steps": 1}, **chosen)
        budgets = layer_budgets(layer_budget, 12, measured[layer_budget], 37, base_share=0.4)
        assert 44 <= sum(budgets) <= 48, chosen
        for layer, budget in zip(counts(retained), budgets, strict=True):
            assert len(layer) == heads
            assert sum(layer) <= budget * heads, chosen
            assert sum(layer) > (budget - 1) * heads, "only rounding loses tokens where no head is at its cap"
            assert len(set(layer)) == 1 or head_budget != "uniform"
        for positions in itertools.chain(*retained):
            assert positions == sorted(set(positions))
            assert set(positions) <= set(range(37))


def test_layer_and_head_budgets_follow_importance_and_preference(per_head):
    by_layer = counts(per_head(kv_budget=12, head_budget="uniform"))
    assert by_layer[0] == by_layer[3] != by_layer[1] == by_layer[2]
    assert counts(per_head(kv_budget=12, layer_budget="pyramid", head_budget="uniform")) == [
        [24] * 4, [16] * 4, [8] * 4, [0] * 4,
    ]  # fmt: skip
    assert counts(per_head(kv_budget=12, alpha=1.0)) == by_layer, "nothing is shared"
    assert any(len(set(layer)) > 1 for layer in counts(per_head(kv_budget=12, alpha=0.0)))
    assert per_head(kv_budget=37) == [[list(range(37))] * 4] * 4, "a budget of the whole prompt evicts nothing"


# Less by request


@pytest.mark.parametrize(("method", "options"), [("sparse", {}), ("es_dllm", {"keep_schedule": [[1, 0], [0.5, 0.25]]})])
def test_a_request_may_retain_less_than_the_engine(ask, method, options):
    less = ask(method, retention_ratio=0.5, asked={"retention_ratio": 0.25}, **options)
    sizes = {len(layer) for block in less.traces["retained_positions"] for layer in block}
    assert sizes == {int((37 + 16) * 0.25)}
    with pytest.raises(ValueError, match=r"retention_ratio=0\.9"):
        ask(method, retention_ratio=0.5, asked={"retention_ratio": 0.9}, **options)


def test_a_request_may_retain_less_of_its_prompt(per_head):
    def kept(ratio: float, **options: Any) -> list[list[int]]:
        return counts(per_head(prompt=[*PROMPT, 1, 2, 3], asked={"retention_ratio": ratio}, **options))

    assert kept(0.5, **EVEN) == [[12] * 4] * 4, "20 is more than the budget"
    assert kept(0.2, **EVEN) == [[8] * 4] * 4
    assert kept(0.0, **EVEN) == [[0] * 4] * 4
    half = EVEN | {"kv_budget": None, "retention_ratio": 0.5}
    assert kept(0.5, **half) == [[20] * 4] * 4
    with pytest.raises(ValueError, match=r"retention_ratio=0.6"):
        kept(0.6, **half)
