"""Head budgets: numbers worked out by hand, and what holds for any."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.model_executor.retention import head_budgets as module
from dllm_engine.model_executor.retention.head_budgets import HEAD_BUDGETS
from tests.oracles import maskkv as plain_maskkv


def head_budgets(*arguments, **settings) -> list[int]:
    return module.head_budgets(*arguments, **settings).tolist()


def test_adaptive():
    # Budget 3 of two heads: of all scores the highest 6 are the first head's 9, 8, 7, 6, 5 and the second's 5.5.
    scores = torch.tensor([[9.0, 8, 7, 6, 5, 1, 1], [5.5, 4, 3, 2, 1, 1, 1]])
    # A fifth of 3 to each, 0.8 of the 5 and the 1: 4.6 and 1.4.
    assert head_budgets("adaptive", scores, 3, base_share=0.1) == [4, 1]
    assert head_budgets("adaptive", scores.flip(0), 3, base_share=0.1) == [1, 4]
    # All scores are among the highest 14 or more; 0.2 · 9 + 0.8 · 7 = 7.4.
    assert head_budgets("adaptive", scores, 9, base_share=0.1) == [7, 7]
    assert head_budgets("adaptive", scores, 0, base_share=0.1) == [0, 0]
    # All 10 scores are among the highest 10: 0.2 · 5 + 0.8 · 5.
    few = torch.tensor([[9.0, 8, 7, 6, 5], [4, 3, 2, 1, 0.5]])
    assert head_budgets("adaptive", few, 5, base_share=0.1) == [5, 5]
    # All 7 of the first head and one of the second: 0.8 + 5.6 and 0.8 + 0.8.
    lonely = torch.stack((scores[0] + 10, scores[1]))
    assert head_budgets("adaptive", lonely, 4, base_share=0.1) == [6, 1]


@pytest.mark.parametrize("kind", HEAD_BUDGETS)
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    heads=st.integers(1, 8),
    tokens=st.integers(0, 60),
    budget=st.integers(0, 70),
    base_share=st.floats(0, 1),
    scale=st.sampled_from([0, 1, 1]),
)
def test_heads_keep_to_the_budget_of_the_layer(kind, seed, heads, tokens, budget, base_share, scale):
    scores = torch.rand(heads, tokens, generator=torch.Generator().manual_seed(seed)).pow(6) * scale
    floored = head_budgets(kind, scores, budget, base_share=base_share)
    assert sum(floored) <= budget * heads
    assert all(0 <= amount <= tokens for amount in floored)
    if kind != "adaptive":
        masses = scores.double().sum(dim=1).tolist() if scores.any() else [1.0] * heads  # without any preference
        assert floored == plain_maskkv.head_budgets(masses, budget, tokens, kind=kind, alpha=base_share)
