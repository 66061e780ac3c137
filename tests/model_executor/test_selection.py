"""Choosing among the candidates of many requests at once, by a count, by draws, and by rules of parallel unmasking."""

import pytest
import torch

from dllm_engine.model_executor.unmasking.rules import PARALLEL_RULES, drawn_below, first_of_all
from dllm_engine.model_executor.unmasking.selection import select

RULES = PARALLEL_RULES | {"count": first_of_all, "draws": drawn_below}


def pick(rule: str, confidences: list[list[float]], values: list[float]) -> list[list[int]]:
    """Per request, the offsets of what is chosen; their windows are of one size."""
    table = torch.tensor(confidences)
    requests, offsets = torch.ones_like(table).nonzero().T
    chosen = select(RULES[rule], table.flatten(), requests, offsets, torch.tensor(values), table.shape[1])
    return [of_request.nonzero()[:, 0].tolist() for of_request in chosen.view(table.shape)]


@pytest.mark.parametrize("size", [3, 20, 200])
def test_of_equally_confident_ones_the_first_are_chosen(size):
    assert pick("count", [[0.5] * size, [1.0] * size], [2.0, 3.0]) == [[0, 1], [0, 1, 2]]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_what_must_not_be_chosen_never_is(rule):
    confidences = [[-torch.inf, -1.0, -torch.inf], [-torch.inf] * 3]
    assert pick(rule, confidences, [5.0, 5.0]) == [[1], []]


# Rules of parallel unmasking, for one request


def chosen(kind: str, confidence: list[float], value: float) -> list[int]:
    (picked,) = pick(kind, [confidence], [value])
    return picked


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


@pytest.mark.parametrize(
    ("value", "expected"),
    # With the largest they are 0.25, 0.75, 1.75, 3.75.
    [(0.0, [1]), (0.75, [1]), (0.76, [1, 3]), (1.75, [1, 3]), (1.76, [0, 1, 3]), (4.0, [0, 1, 2, 3])],
)
def test_entropies_stay_below_the_budget(value, expected):
    assert chosen("entropy_budget", [-1.0, -0.25, -2.0, -0.5], value) == expected


def test_positions_without_entropy_are_all_filled_under_any_bound():
    # Σ p log(p + 1e-10) of a certain token is a little above 0.
    assert chosen("entropy_bound", [0.0, -3.0, 1e-10, 0.0], 0.0) == [0, 1, 2, 3]
