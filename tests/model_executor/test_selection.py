"""Choosing among the candidates of many requests at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm_engine.model_executor.unmasking.rules import PARALLEL_RULES, drawn_below, first_of_all
from dllm_engine.model_executor.unmasking.selection import select

RULES = PARALLEL_RULES | {"count": first_of_all, "draws": drawn_below}


def pick(rule: str, confidences: list[list[float]], values: list[float], offsets: list[list[int]], width: int):
    """Per request, the offsets of what is chosen."""
    requests = [i for i, of_request in enumerate(confidences) for _ in of_request]
    flat = [offset for of_request in offsets for offset in of_request]
    chosen = select(
        RULES[rule],
        torch.tensor([c for of_request in confidences for c in of_request]),
        torch.tensor(requests, dtype=torch.int64),
        torch.tensor(flat, dtype=torch.int64),
        values,
        width,
    )
    picked: list[list[int]] = [[] for _ in confidences]
    for request, offset, taken in zip(requests, flat, chosen.tolist(), strict=True):
        if taken:
            picked[request].append(offset)
    return picked


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


@given(
    st.sampled_from(sorted(RULES)),
    st.lists(st.lists(st.sampled_from([0.125, 0.5, 0.625, 0.75, 1.0]), max_size=6), min_size=1, max_size=4),
    st.floats(0.0625, 4, width=32),
    st.integers(0, 40),
)
def test_the_batch_changes_nothing(rule, confidences, value, further):
    if rule == "entropy_bound":
        confidences = [[-c for c in of_request] for of_request in confidences]
    offsets = [[*range(len(of_request))] for of_request in confidences]
    together = pick(rule, confidences, [value] * len(confidences), offsets, 6 + further)
    for of_request, its_offsets, picked in zip(confidences, offsets, together, strict=True):
        assert [picked] == pick(rule, [of_request], [value], [its_offsets], 6)


@pytest.mark.parametrize("size", [3, 20, 200])
def test_of_equally_confident_ones_the_first_are_chosen(size):
    assert pick("count", [[0.5] * size, [1.0] * size], [2, 3], [[*range(size)]] * 2, size) == [[0, 1], [0, 1, 2]]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_what_must_not_be_chosen_never_is(rule):
    confidences = [[-torch.inf, -1.0, -torch.inf], [-torch.inf] * 3]
    assert pick(rule, confidences, [5.0, 5.0], [[0, 1, 2]] * 2, 3) == [[1], []]
