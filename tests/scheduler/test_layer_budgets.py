"""Layer budgets: numbers worked out by hand, and what holds for any."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.scheduler.methods.layer_budgets import LAYER_BUDGETS, layer_budgets
from tests.oracles import maskkv as plain_maskkv


@pytest.mark.parametrize(
    ("kind", "average", "importance", "expected"),
    [
        # Layers of no importance get the same.
        *((kind, 7, [0.0] * 4, [7] * 4) for kind in ("uniform", "boundary", "squeeze")),
        # The last int(20 / 20) = 1, the first 2 · 20 − 1; 39, 39 − 38 / 3, 39 − 76 / 3, 1, whatever their importance.
        *(("pyramid", 20, importance, [39, 26, 13, 1]) for importance in ([0.0] * 4, [0.3, 0.1, 0.1, 0.5])),
        ("pyramid", 10, [1, 1, 1], [20, 10, 0]),
        ("pyramid", 10, [1], [10]),
    ],
)
def test_budgets(kind, average, importance, expected):
    assert layer_budgets(kind, average, importance, 100, base_share=0.4) == expected


IMPORTANCE = st.lists(st.floats(0, 2), min_size=1, max_size=12)


@pytest.mark.parametrize("kind", LAYER_BUDGETS)
@settings(max_examples=80, deadline=None)
@given(average=st.integers(0, 80), importance=IMPORTANCE, base_share=st.floats(0, 1), prompt_length=st.integers(1, 100))
def test_budgets_sum_to_no_more_than_the_average(kind, average, importance, base_share, prompt_length):
    floored = layer_budgets(kind, average, importance, prompt_length, base_share=base_share)
    layers = len(importance)
    assert len(floored) == layers
    assert min(floored) >= 0
    assert sum(floored) <= average * layers
    if average >= prompt_length:
        assert floored == [prompt_length] * layers
        return
    if kind == "boundary":
        assert floored == plain_maskkv.layer_budgets(average, importance, layers, beta=base_share)
    if kind == "squeeze":
        assert floored == plain_maskkv.squeeze(average, importance)
    assert sum(floored) > (average - 2) * layers, "more is lost than rounding loses"
