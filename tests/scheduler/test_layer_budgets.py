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


def test_uniform():
    assert budgets("uniform", 7, PROFILE) == [7] * 4
    assert budgets("uniform", 7, PROFILE, redistribute=True) == [7] * 4
    assert budgets("uniform", 0, PROFILE) == [0] * 4


def test_boundary():
    # Base int(0.4 · 10) = 4, pool 6 · 4 = 24. The boundary's 0.8 of the importance earn int(19.2) = 19, so
    # int(4 + 9.5); the middle the 5 left, so int(4 + 2.5).
    assert budgets("boundary", 10, PROFILE) == [13, 6, 6, 13]
    # Base 4, pool 30; 3 of 9 parts: 10 for the boundary, 20 for three in the middle.
    assert budgets("boundary", 10, [1, 1, 2, 3, 2]) == [9, 10, 10, 10, 9]
    assert budgets("boundary", 10, PROFILE, base_share=1.0) == [10] * 4
    # No base: int(0.8 · 40) = 32 and 8.
    assert budgets("boundary", 10, PROFILE, base_share=0.0) == [16, 4, 4, 16]
    # Everything to the first and the last; more than the prompt, which heads cut off.
    assert budgets("boundary", 10, [1, 0, 0, 1], 12) == [16, 4, 4, 16]
    # One layer, and two, are all boundary.
    assert budgets("boundary", 10, [0.3]) == [10]
    assert budgets("boundary", 10, [0.3, 0.1]) == [10, 10]


def test_boundary_that_loses_nothing():
    # 4 + 19.2 / 2 = 13.6 and 4 + 4.8 / 2 = 6.4; the two lost tokens go to those that lack 0.6.
    assert budgets("boundary", 10, PROFILE, redistribute=True) == [14, 6, 6, 14]
    # The boundary stops at 12; of the 16 left the middle's two get 8 each.
    assert budgets("boundary", 10, PROFILE, 12, redistribute=True) == [12, 8, 8, 12]


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


@pytest.mark.parametrize(
    ("shares", "total", "cap", "expected"),
    [
        ([1.2, 1.7, 7.1], 10, 99, [1, 2, 7]),  # the one left to who lacks 0.7
        ([1.2, 1.7, 7.1], 11, 99, [2, 2, 7]),  # then 0.2
        ([1.5, 1.5, 1.5], 4, 99, [2, 1, 1]),  # equals: the first
        ([1.2, 1.7, 7.1], 10, 5, [2, 3, 5]),  # 7.1 stops at 5, and 2 and 1 are handed on
        ([5.0, 5.0], 10, 3, [3, 3]),  # there is no more to have
        ([1.0, 1.0], 4, 0, [0, 0]),
        ([3.0, 1.0], 2, 9, [3, 1]),  # never less than the whole part
        ([], 0, 5, []),
    ],
)
def test_largest_remainder(shares, total, cap, expected):
    assert largest_remainder(shares, total, cap) == expected


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
    assert sum(floored) > (average - 2) * layers or average >= prompt_length, "more is lost than rounding loses"
