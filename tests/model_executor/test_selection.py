"""Choosing among the candidates of many requests at once, by a count, by draws, and by rules of parallel unmasking."""

import pytest
import torch

from dllm_engine.model_executor.unmasking.rules import PARALLEL_RULES, drawn_below, first_of_all
from dllm_engine.model_executor.unmasking.selection import select

RULES = PARALLEL_RULES | {"count": first_of_all, "draws": drawn_below}


def pick(
    rule: str,
    confidences: list[list[float]],
    values: list[float],
    offsets: list[list[int]],
    width: int,
    guaranteed=None,
    least=None,
    enough=None,
):
    """Per request, the offsets of what is chosen."""
    requests = [i for i, of_request in enumerate(confidences) for _ in of_request]
    flat = [offset for of_request in offsets for offset in of_request]
    chosen = select(
        RULES[rule],
        torch.tensor([c for of_request in confidences for c in of_request]),
        torch.tensor(requests, dtype=torch.int64),
        torch.tensor(flat, dtype=torch.int64),
        torch.tensor(values, dtype=torch.float32),
        width,
        None if guaranteed is None else torch.tensor(guaranteed),
        None if least is None else torch.tensor(least),
        None if enough is None else torch.tensor(enough),
    )
    picked: list[list[int]] = [[] for _ in confidences]
    for request, offset, taken in zip(requests, flat, chosen.tolist(), strict=True):
        if taken:
            picked[request].append(offset)
    return picked


def test_a_rule_that_allows_few_leaves_as_many_as_are_asked_for():
    confidences = [[0.25, 0.5, 0.75], [0.875, 0.75], [0.25]]
    offsets = [[0, 3, 5], [2, 4], [1]]
    chosen = pick("threshold", confidences, [0.7, 0.7, 0.7], offsets, 6, least=[2, 1, 3])
    assert chosen == [[3, 5], [2, 4], [1]]
    assert pick("threshold", confidences, [0.7] * 3, offsets, 6, guaranteed=[1, 0, 0], least=[2, 0, 0])[0] == [0, 3, 5]


@pytest.mark.parametrize(
    ("enough", "least", "expected"),
    [
        ([3, 0], None, [[0, 3, 5], [2, 4]]),
        ([4, 3], None, [[5], [2]]),
        ([1, 2], None, [[0, 3, 5], [2, 4]]),
        ([4, 0], [2, 0], [[3, 5], [2, 4]]),
    ],
)
def test_where_a_rule_allows_too_few_the_best_is_chosen(enough, least, expected):
    confidences, offsets = [[0.625, 0.75, 0.875], [0.875, 0.75]], [[0, 3, 5], [2, 4]]
    assert pick("slow_fast", confidences, [0.6, 0.6], offsets, 6, enough=enough, least=least) == expected


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        ("count", [2, 1, 0, 9], [[3, 5], [0], [], [2, 4]]),
        ("draws", [0.6, 0.5, 0.1, 0.85], [[0, 3], [0], [], [4]]),
        ("threshold", [0.5, 0.9, 0.1, 0.95], [[3, 5], [0], [1], [2]]),
    ],
)
def test_every_request_goes_by_its_own_value(rule, values, expected):
    confidences = [[0.25, 0.5, 0.75], [0.25], [0.5], [0.875, 0.75]]
    assert pick(rule, confidences, values, [[0, 3, 5], [0], [1], [2, 4]], 6) == expected


@pytest.mark.parametrize(
    ("guaranteed", "expected"),
    [([0, 0], [[], [3]]), ([1, 2], [[], [1, 3]]), ([3, 4], [[1], [3]]), ([9, 9], [[4], [3]])],
)
def test_a_part_of_the_window_gets_its_most_confident_candidate_at_least(guaranteed, expected):
    """An entropy below 1 passes; where none does so in the part, its lowest, and of equal ones the first."""
    confidences = [[-2.0, -2.0, -1.5], [-3.0, -0.5, -4.0]]
    offsets = [[1, 2, 4], [1, 3, 5]]
    assert pick("strict_entropy_threshold", confidences, [1.0, 1.0], offsets, 6, guaranteed) == expected


@pytest.mark.parametrize("size", [3, 20, 200])
def test_of_equally_confident_ones_the_first_are_chosen(size):
    assert pick("count", [[0.5] * size, [1.0] * size], [2, 3], [[*range(size)]] * 2, size) == [[0, 1], [0, 1, 2]]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_what_must_not_be_chosen_never_is(rule):
    confidences = [[-torch.inf, -1.0, -torch.inf], [-torch.inf] * 3]
    assert pick(rule, confidences, [5.0, 5.0], [[0, 1, 2]] * 2, 3) == [[1], []]


# Rules of parallel unmasking, for one request


def chosen(kind: str, confidence: list[float], value: float) -> list[int]:
    (picked,) = pick(kind, [confidence], [value], [[*range(len(confidence))]], len(confidence))
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


@pytest.mark.parametrize("kind", PARALLEL_RULES)
def test_one_candidate_is_always_chosen(kind):
    for confidence in (0.0, 0.3, 1.0):
        assert chosen(kind, [-confidence if kind.startswith("entropy_b") else confidence], 0.5) == [0]
