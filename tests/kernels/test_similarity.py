"""Similarity of fresh and retained values, on the CPU, against the formulas and
PyTorch's own.
"""

import pytest
import torch
import torch.nn.functional as F

from dllm_engine.kernels.similarity import (
    cosine,
    negative_distance,
)


def sums_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack(((a * b).sum(1), a.square().sum(1), b.square().sum(1)))


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-9, 1.0, 1e6])
def test_cosine_is_that_of_pytorch_for_short_vectors_too(size):
    a, b = torch.randn(2, 30, 8) * size
    torch.testing.assert_close(
        cosine(sums_of(a, b)), F.cosine_similarity(a, b), rtol=1e-5, atol=1e-6
    )


def test_distances_are_those_of_pytorch_and_none_where_a_row_differs_by_rounding_alone():
    torch.manual_seed(0)
    a, b = torch.randn(2, 30, 96)
    b[:10] = a[:10]
    b[10:20] = a[10:20] * (1 + 2e-7)
    distance = -negative_distance(sums_of(a, b))
    assert not distance[:20].any()
    torch.testing.assert_close(
        distance[20:], (a - b)[20:].square().sum(1), rtol=1e-5, atol=0
    )
