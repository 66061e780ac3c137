"""What ``sparse`` and ``maskkv`` retain: scorers, and budgets of layers and heads."""

import itertools
import random
from typing import Any

import pytest

from dllm_engine.model_executor.retention.head_budgets import HEAD_BUDGETS
from dllm_engine.scheduler.methods.layer_budgets import LAYER_BUDGETS, layer_budgets
from tests.oracles.maskkv import importance
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
