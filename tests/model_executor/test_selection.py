"""Choosing among the candidates of many requests at once, by a count, by draws, and by
rules of parallel unmasking.
"""

import pytest
import torch

from dllm_engine.decoding.unmasking_policies import PARALLEL_RULES
from dllm_engine.model_executor.unmasking.selection import (
    Bounds,
    Cells,
    drawn_below,
    first_of_all,
    parallel_rule,
    select,
)

OTHERS = {"count": first_of_all, "draws": drawn_below}


def pick(
    rule: str, confidences: list[list[float]], values: list[float]
) -> list[list[int]]:
    """Per request, the offsets of what is chosen; their windows are of one size."""
    table = torch.tensor(confidences)
    requests, offsets = torch.ones_like(table).nonzero().T
    one = rule in PARALLEL_RULES and not PARALLEL_RULES[rule].may_pass_none
    least = torch.full((len(values),), int(one))
    chosen = select(
        OTHERS.get(rule) or parallel_rule(rule),
        table.flatten(),
        Cells(requests, offsets, table.shape[1]),
        torch.tensor(values),
        Bounds(least=least),
    )
    return [
        of_request.nonzero()[:, 0].tolist() for of_request in chosen.view(table.shape)
    ]


def test_of_equally_confident_ones_the_first_are_chosen():
    assert pick("count", [[0.5] * 200, [1.0] * 200], [2.0, 3.0]) == [[0, 1], [0, 1, 2]]


PROBABILITIES = [0.5, 0.75, 0.25, 0.875]
ENTROPIES = [-1.0, -0.25, -2.0, -0.5]
REACHED = [
    (0.75, [1, 3]),
    (0.5, [0, 1, 3]),
    (0.51, [1, 3]),
    (0.76, [3]),
    (1.0, [3]),
    (0.01, [0, 1, 2, 3]),
]
"""0.5 and 0.75 are exact in float32: what reaches the value counts, and always the
best.
"""


@pytest.mark.parametrize(
    ("kind", "confidence", "expected"),
    [
        ("threshold", PROBABILITIES, REACHED),
        ("margin", PROBABILITIES, REACHED),
        # In order 0.875, 0.75, 0.5, 0.25: (n + 1)(1 - c) is 0.25, 0.75, 2, 3.75, and
        # must stay below the value.
        (
            "factor",
            PROBABILITIES,
            [(0.1, [3]), (0.25, [3]), (0.75, [3]), (0.8, [1, 3]), (2.0, [1, 3])],
        ),
        ("factor", PROBABILITIES, [(2.1, [0, 1, 3]), (4.0, [0, 1, 2, 3])]),
        # The sums of 0.25, 0.5, 1, 2 without the largest, 0, 0.25, 0.75, 1.75, stay
        # within the bound.
        (
            "entropy_bound",
            ENTROPIES,
            [(0.0, [1]), (0.2, [1]), (0.25, [1, 3]), (0.74, [1, 3]), (0.75, [0, 1, 3])],
        ),
        ("entropy_bound", ENTROPIES, [(2.0, [0, 1, 2, 3])]),
        # With the largest, 0.25, 0.75, 1.75, 3.75, they stay below the budget.
        (
            "entropy_budget",
            ENTROPIES,
            [
                (0.0, [1]),
                (0.75, [1]),
                (0.76, [1, 3]),
                (1.75, [1, 3]),
                (1.76, [0, 1, 3]),
            ],
        ),
        ("entropy_budget", ENTROPIES, [(4.0, [0, 1, 2, 3])]),
    ],
)
def test_what_each_rule_fills(kind, confidence, expected):
    assert [
        (value, *pick(kind, [confidence], [value])) for value, _ in expected
    ] == expected
