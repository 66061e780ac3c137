"""Rules of parallel unmasking, against examples worked out by hand and against their definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm_engine.model_executor.unmasking.rules import PARALLEL_RULES
from dllm_engine.model_executor.unmasking.selection import select


def chosen(kind: str, confidence: list[float], value: float) -> list[int]:
    offsets = torch.arange(len(confidence))
    values = torch.tensor(confidence, dtype=torch.float32)
    picked = select(PARALLEL_RULES[kind], values, torch.zeros_like(offsets), offsets, [value], len(confidence))
    return picked.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("kind", ["threshold", "margin"])
@pytest.mark.parametrize(
    ("value", "expected"),
    # 0.5 and 0.75 are exact in float32: what reaches the value counts.
    [(0.75, [1, 3]), (0.5, [0, 1, 3]), (0.51, [1, 3]), (0.76, [3]), (1.0, [3]), (0.01, [0, 1, 2, 3])],
)
def test_all_that_reach_the_value_and_always_the_best(kind, value, expected):
    assert chosen(kind, [0.5, 0.75, 0.25, 0.875], value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    # In order 0.875, 0.75, 0.5, 0.25: (n + 1)(1 - c) is 0.25, 0.75, 2, 3.75, and must stay below the value.
    [(0.1, [3]), (0.25, [3]), (0.75, [3]), (0.8, [1, 3]), (2.0, [1, 3]), (2.1, [0, 1, 3]), (4.0, [0, 1, 2, 3])],
)
def test_factor_asks_more_of_each_the_more_there_are(value, expected):
    assert chosen("factor", [0.5, 0.75, 0.25, 0.875], value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    # Entropies 1, 0.25, 2, 0.5: the sums of 0.25, 0.5, 1, 2 without the largest are 0, 0.25, 0.75, 1.75.
    [(0.0, [1]), (0.2, [1]), (0.25, [1, 3]), (0.74, [1, 3]), (0.75, [0, 1, 3]), (2.0, [0, 1, 2, 3])],
)
def test_entropies_but_the_largest_stay_within_the_bound(value, expected):
    assert chosen("entropy_bound", [-1.0, -0.25, -2.0, -0.5], value) == expected


def test_positions_without_entropy_are_all_filled_under_any_bound():
    # Σ p log(p + 1e-10) of a certain token is a little above 0.
    assert chosen("entropy_bound", [0.0, -3.0, 1e-10, 0.0], 0.0) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", PARALLEL_RULES)
def test_one_candidate_is_always_chosen(kind):
    for confidence in (0.0, 0.3, 1.0):
        assert chosen(kind, [-confidence if kind == "entropy_bound" else confidence], 0.5) == [0]


@given(st.lists(st.floats(0, 1, width=32, allow_subnormal=False), min_size=1, max_size=12), st.floats(0.0625, 8))
def test_the_largest_set_is_taken(values, value):
    """Of the n surest, for every n: those that satisfy the definition, the largest of them."""
    ordered = sorted(values, reverse=True)
    factor = [n for n in range(1, len(values) + 1) if (n + 1) * (1 - ordered[n - 1]) < value - 1e-4]
    within = [n for n in range(1, len(values) + 1) if (n + 1) * (1 - ordered[n - 1]) < value + 1e-4]
    assert max(factor, default=1) <= len(chosen("factor", values, value)) <= max(within, default=1)
    entropies = sorted(values)
    bounded = [n for n in range(1, len(values) + 1) if sum(entropies[:n]) - max(entropies[:n]) <= value - 1e-4]
    within = [n for n in range(1, len(values) + 1) if sum(entropies[:n]) - max(entropies[:n]) <= value + 1e-4]
    indices = chosen("entropy_bound", [-entropy for entropy in values], value)
    assert max(bounded, default=1) <= len(indices) <= max(within)
    assert sorted(values[i] for i in indices) == entropies[: len(indices)]
