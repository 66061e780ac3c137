"""Budgets of layers and heads: numbers worked out by hand, and what holds for any."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm_engine.cache_methods.maskkv.budgets import (
    HEAD_BUDGETS,
    LAYER_BUDGETS,
    head_budgets,
    layer_budgets,
)
from tests.oracles import maskkv as plain_maskkv


@pytest.mark.parametrize(
    ("average", "importance", "expected"),
    [
        # The last int(20 / 20) = 1, the first 2 · 20 − 1; 39, 39 − 38 / 3, 39 − 76 / 3,
        # 1, whatever their importance.
        *(
            (20, importance, [39, 26, 13, 1])
            for importance in ([0.0] * 4, [0.3, 0.1, 0.1, 0.5])
        ),
        (10, [1, 1, 1], [20, 10, 0]),
        (10, [1], [10]),
    ],
)
def test_pyramid(average, importance, expected):
    assert layer_budgets("pyramid", average, importance, base_share=0.4) == expected


@pytest.mark.parametrize("kind", LAYER_BUDGETS)
@given(
    average=st.integers(0, 80),
    importance=st.lists(st.floats(0, 2), min_size=1, max_size=12) | st.just([0.0] * 4),
    base_share=st.floats(0, 1),
)
def test_layers_have_the_average_and_no_more(kind, average, importance, base_share):
    floored = layer_budgets(kind, average, importance, base_share=base_share)
    layers = len(importance)
    assert len(floored) == layers
    assert min(floored) >= 0
    assert sum(floored) <= average * layers
    if kind == "boundary":
        assert floored == plain_maskkv.layer_budgets(
            average, importance, beta=base_share
        )
    if kind == "squeeze":
        assert floored == plain_maskkv.squeeze(average, importance)
    assert sum(floored) > (average - 2) * layers, "more is lost than rounding loses"


@pytest.mark.parametrize("kind", HEAD_BUDGETS)
@given(
    seed=st.integers(0, 10_000),
    heads=st.integers(1, 8),
    tokens=st.integers(0, 60),
    budget=st.integers(0, 70),
    base_share=st.floats(0, 1),
    scale=st.sampled_from([0, 1, 1]),
)
def test_heads_keep_to_the_budget_of_the_layer(
    kind, seed, heads, tokens, budget, base_share, scale
):
    scores = (
        torch.rand(heads, tokens, generator=torch.Generator().manual_seed(seed)).pow(6)
        * scale
    )
    floored = head_budgets(kind, scores, budget, base_share=base_share).tolist()
    assert sum(floored) <= budget * heads
    assert all(0 <= amount <= tokens for amount in floored)
    if kind == "adaptive":  # of equal ones any
        assert (
            floored == plain_maskkv.adaptive_budgets(scores, budget) or not scores.any()
        )
    else:
        masses = (
            scores.double().sum(dim=1).tolist() if scores.any() else [1.0] * heads
        )  # without any preference
        assert floored == plain_maskkv.head_budgets(
            masses, budget, tokens, kind=kind, alpha=base_share
        )
