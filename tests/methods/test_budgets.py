"""Budgets of layers and heads, worked out by hand."""

import pytest
import torch

from dllm_engine.cache_methods.maskkv.budgets import (
    head_budgets,
    layer_budgets,
)


@pytest.mark.parametrize(
    ("average", "importance", "expected"),
    [
        # The last int(20 / 20) = 1, the first 2 · 20 − 1; 39, 39 − 38 / 3, 39 − 76 / 3,
        # 1, whatever their importance.
        *(
            (20, importance, [39, 26, 13, 1])
            for importance in ([0.0] * 4, [0.3, 0.1, 0.1, 0.5])
        ),
        (10, [1, 1, 1], [20, 10, 0]),
        (10, [1], [10]),
    ],
)
def test_pyramid(average, importance, expected):
    assert layer_budgets("pyramid", average, importance, base_share=0.4) == expected


def test_heads_share_by_their_highest_scores():
    """Of the four highest, three and one: a fifth of 2, and four fifths of these."""
    scores = torch.tensor([[9.0, 8.0, 7.0, 0.0], [6.0, 1.0, 1.0, 1.0]])
    assert head_budgets("adaptive", scores, 2, base_share=0.0).tolist() == [2, 1]
