"""Layer budgets: numbers worked out by hand, and what holds for any."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.scheduler.methods.layer_budgets import LAYER_BUDGETS, largest_remainder, layer_budgets
from tests.oracles import maskkv as plain_maskkv

PROFILE = [0.3, 0.1, 0.1, 0.5]


def budgets(kind, average, importance, prompt_length=100, *, num_layers=None, base_share=0.4, redistribute=False):
    layers = num_layers if importance is None else len(importance)
    return layer_budgets(
        kind, average, importance, layers, prompt_length, base_share=base_share, redistribute=redistribute
    )


@pytest.mark.parametrize("importance", [None, [0.0] * 4])
def test_nothing_known_of_the_layers_is_the_same_for_all(importance):
    for kind in ("uniform", "boundary", "squeeze"):
        assert budgets(kind, 7, importance, num_layers=4) == [7] * 4
    # Not a matter of importance.
    assert budgets("pyramid", 20, importance, num_layers=4) == budgets("pyramid", 20, PROFILE)


def test_pyramid():
    # The last int(20 / 20) = 1, the first 2 · 20 − 1; 39, 39 − 38 / 3, 39 − 76 / 3, 1.
    assert budgets("pyramid", 20, PROFILE) == [39, 26, 13, 1]
    assert budgets("pyramid", 20, PROFILE, redistribute=True) == [39, 26, 14, 1]
    assert budgets("pyramid", 10, [1, 1, 1]) == [20, 10, 0]
    assert budgets("pyramid", 10, [1]) == [10]
    # Capped at 30. Of 39, 26.33, 13.67 and 1 the other three hand on ten tokens: one to who lacks 0.67, one to who
    # lacks 0.33, and then in turn to the last, the third and the second.
    assert budgets("pyramid", 20, PROFILE, 30, redistribute=True) == [30, 29, 17, 4]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(0, 50), min_size=1, max_size=8), st.integers(0, 60), st.integers(0, 20))
def test_largest_remainder_is_that_of_the_plain_version(shares, cap, more):
    total = sum(min(int(share), cap) for share in shares) + more
    amounts = largest_remainder(shares, total, cap)
    assert amounts == plain_maskkv.largest_remainder(shares, total, cap)


IMPORTANCE = st.lists(st.floats(0, 2), min_size=1, max_size=12)


@pytest.mark.parametrize("kind", LAYER_BUDGETS)
@settings(max_examples=80, deadline=None)
@given(average=st.integers(0, 80), importance=IMPORTANCE, base_share=st.floats(0, 1), prompt_length=st.integers(1, 100))
def test_budgets_sum_to_no_more_than_the_average(kind, average, importance, base_share, prompt_length):
    floored = budgets(kind, average, importance, prompt_length, base_share=base_share)
    exact = budgets(kind, average, importance, prompt_length, base_share=base_share, redistribute=True)
    layers = len(importance)
    assert len(floored) == len(exact) == layers
    assert sum(exact) == min(average, prompt_length) * layers
    assert max(exact) <= prompt_length
    assert min(floored + exact) >= 0
    assert sum(floored) <= average * layers
    if average >= prompt_length:
        assert floored == [prompt_length] * layers
        return
    if kind == "boundary":
        for redistribute, found in ((False, floored), (True, exact)):
            shares = {"beta": base_share, "redistribute": redistribute, "prompt_length": prompt_length}
            assert found == plain_maskkv.layer_budgets(average, importance, layers, **shares)
    if kind == "squeeze":
        assert floored == plain_maskkv.squeeze(average, importance)
    assert sum(floored) > (average - 2) * layers, "more is lost than rounding loses"
