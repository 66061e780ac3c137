"""Similarity of fresh and retained values, on the CPU, against the formulas and
PyTorch's own.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dllm_engine.kernels.similarity import (
    cosine,
    negative_distance,
    replace_and_compare,
)
from tests.kernels.checks import NUMBERS, error


def sums_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack(((a * b).sum(1), a.square().sum(1), b.square().sum(1)))


@given(
    rows=st.one_of(st.integers(0, 3), st.integers(0, 150)),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    dim=st.sampled_from([8, 64, 96]),
    slots_per_page=st.sampled_from([1, 3, 16, 64]),
    numbers=NUMBERS,
)
def test_sums_equal_the_formula_and_read_only_what_is_retained(
    rows, kv_heads, dim, slots_per_page, numbers
):
    """Slots that no row has hold NaN, and so do fresh values of heads that have no
    slot.
    """
    pages = torch.full(
        (2 - (-rows * kv_heads // slots_per_page), slots_per_page, dim),
        torch.nan,
        dtype=numbers.dtype,
    )
    slots = numbers.slots(pages, rows, kv_heads)
    fresh, retained = numbers.normal(rows, 2 * kv_heads, dim).split(kv_heads, dim=1)
    kept = slots >= 0
    fresh[~kept] = torch.nan
    pages[slots[kept] // slots_per_page, slots[kept] % slots_per_page] = retained[kept]
    a, b = (
        x.double().masked_fill(~kept[..., None], 0.0).flatten(1)
        for x in (fresh, retained)
    )
    expected = sums_of(a, b)
    replaced = pages.clone()
    replaced[slots[kept] // slots_per_page, slots[kept] % slots_per_page] = fresh[kept]
    sums = replace_and_compare(fresh, pages, slots)
    torch.testing.assert_close(pages[1:], replaced[1:], rtol=0, atol=0, equal_nan=True)
    assert sums.dtype == torch.float32
    assert (
        error(sums, expected) < 1e-5
    )  # the products are exact in float32 whatever the type of the inputs


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
