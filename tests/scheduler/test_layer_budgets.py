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


def test_squeeze():
    # Clusters around 0.1, 0.3 and 0.5. The two least important keep 0.4 · 10 each; (40 − 8) / 2 for the others.
    assert budgets("squeeze", 10, PROFILE) == [16, 4, 4, 16]
    assert budgets("squeeze", 10, [0.1, 0.12, 0.9, 0.5, 0.52]) == [4, 4, 14, 14, 14]
    # (50 − 4) / 4 = 11.5; two of the four get the tokens that rounding loses, the first ones.
    assert budgets("squeeze", 10, [0.1, 0.9, 0.9, 0.9, 0.9]) == [4, 11, 11, 11, 11]
    assert budgets("squeeze", 10, [0.1, 0.9, 0.9, 0.9, 0.9], redistribute=True) == [4, 12, 12, 11, 11]
    assert budgets("squeeze", 10, [0.4] * 3) == [10] * 3
    # Centres move: from 0, 5 and 10 the first pass gives 0 to 2 to the first, which moves to 1 and gives up none; the
    # second starts with 3, 4 and 7, moves to 4.67, and keeps them.
    assert budgets("squeeze", 10, [0, 1, 2, 3, 4, 7, 10]) == [4, 4, 4, 14, 14, 14, 14]


def test_a_prompt_within_the_average_is_kept_whole():
    for kind in LAYER_BUDGETS:
        assert budgets(kind, 50, PROFILE, 50) == [50] * 4
        assert budgets(kind, 1000, PROFILE, 50) == [50] * 4
        assert budgets(kind, 49, [0.25] * 4, 50) != [50] * 4


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
    assert sum(floored) <= min(average, prompt_length) * layers or average < prompt_length
    assert sum(floored) <= average * layers
    if kind == "boundary" and average < prompt_length:
        for redistribute, found in ((False, floored), (True, exact)):
            shares = {"beta": base_share, "redistribute": redistribute, "prompt_length": prompt_length}
            assert found == plain_maskkv.layer_budgets(average, importance, layers, **shares)
    assert sum(floored) > (average - 2) * layers or average >= prompt_length, "more is lost than rounding loses"
