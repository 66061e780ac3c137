"""Bidirectional attention against its formula in float64."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.kernels import attention
from tests.kernels import formulas
from tests.support.kernels import TOLERANCE, error


def bidirectional_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    return attention.bidirectional_attention(q, k, v, bounds, torch.tensor(bounds, dtype=torch.int32))


def inputs(lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(rows, count, dim, generator=generator).to(dtype)

    return draw(heads), draw(kv_heads), draw(kv_heads), [0, *itertools.accumulate(lengths)]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (4, 1)]),
    dim=st.sampled_from([8, 16, 64]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_equals_the_formula(lengths, heads, dim, dtype, seed):
    q, k, v, cu_seqlens = inputs(lengths, *heads, dim, dtype, seed)
    out = bidirectional_attention(q, k, v, cu_seqlens)
    assert out.shape == q.shape
    assert out.dtype == dtype
    assert error(out, formulas.bidirectional_attention(q, k, v, cu_seqlens)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("q", "k", "v", "cu_seqlens", "message"),
    [
        ((4, 2, 8), (4, 2, 8), (4, 1, 8), [0, 4], r"v \[4, 1, 8\] do not belong together"),
        ((4, 2, 8), (5, 2, 8), (5, 2, 8), [0, 4], r"k \[5, 2, 8\]"),
        ((4, 2, 8), (4, 2, 16), (4, 2, 16), [0, 4], r"q \[4, 2, 8\]"),
        ((4, 16), (4, 16), (4, 16), [0, 4], r"q \[4, 16\]"),
        ((4, 3, 8), (4, 2, 8), (4, 2, 8), [0, 4], "3 query heads are not a multiple of 2 KV heads"),
        ((4, 2, 8), (4, 2, 8), (4, 2, 8), [0, 3], r"bounds=\[0, 3\] does not divide 4 rows"),
        ((4, 2, 8), (4, 2, 8), (4, 2, 8), [1, 4], r"bounds=\[1, 4\]"),
        ((4, 2, 8), (4, 2, 8), (4, 2, 8), [0, 3, 2, 4], r"bounds=\[0, 3, 2, 4\]"),
    ],
)
def test_shapes_that_do_not_belong_together_are_named(q, k, v, cu_seqlens, message):
    with pytest.raises(ValueError, match=message):
        bidirectional_attention(torch.zeros(q), torch.zeros(k), torch.zeros(v), cu_seqlens)


@pytest.mark.parametrize("cu_seqlens", [torch.tensor([0, 4]), torch.tensor([0, 2, 4], dtype=torch.int32)])
def test_bounds_on_the_device_must_be_the_same(cu_seqlens):
    x = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"is not int32 \[2\]"):
        attention.bidirectional_attention(x, x, x, [0, 4], cu_seqlens)
