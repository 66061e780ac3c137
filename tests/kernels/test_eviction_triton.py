"""The Triton kernels of eviction, on a GPU or interpreted, and compiled for a GPU where there is none."""

import pytest
import torch

pytest.importorskip("triton")

from dllm_engine.kernels import eviction
from dllm_engine.kernels.eviction import (
    mean_query_scores_reference,
    mean_query_scores_with_triton,
    write_retained_reference,
    write_retained_with_triton,
)
from tests.support.paged_cases import DEVICE, INTERPRETED, compile_launches, error, runs_triton

DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(4, 2, 32), (3, 3, 96), (14, 2, 128)]


@runs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_scores_equal_the_formula(heads, kv_heads, dim, dtype):
    fused = torch.randn(70, heads + kv_heads, dim, device=DEVICE).to(dtype)
    q, k = fused[:19, :heads], fused[:, heads:]
    assert error(mean_query_scores_with_triton(q, k), mean_query_scores_reference(q, k)) < 1e-5
    assert mean_query_scores_with_triton(q, k[:0]).shape == (0,)


@runs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 3, 4])
@pytest.mark.parametrize("held", [0, 11])
def test_retained_rows_fill_the_slots_behind_those_held_and_nothing_else(held, kv_heads, dtype):
    k, v = torch.randn(2, 60, kv_heads, 24, device=DEVICE).to(dtype)
    rows = torch.randperm(60, device=DEVICE)[:37].sort().values
    k_pages, v_pages = torch.full((30, 2, 7, 24), torch.nan, dtype=dtype, device=DEVICE).unbind(1)
    page_table = torch.randperm(30, device=DEVICE).int()
    expected = write_retained_reference(k, v, rows, k_pages, v_pages, page_table, held)
    write_retained_with_triton(k, v, rows, k_pages, v_pages, page_table, held)
    torch.testing.assert_close((k_pages, v_pages), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 32, 128), (14, 2, 96)])
def test_launches_compile_for_a_gpu(monkeypatch, heads, kv_heads, dim):
    kernels = compile_launches(monkeypatch, eviction)
    k = torch.zeros(50, kv_heads, dim, dtype=torch.bfloat16)
    mean_query_scores_with_triton(k.new_zeros(32, heads, dim), k)
    pages = k.new_zeros(10, 2, 16 * kv_heads, dim).unbind(1)
    write_retained_with_triton(k, k, torch.arange(25), *pages, torch.arange(10, dtype=torch.int32))
    assert all(len(kernel.shared_memory) == 1 for kernel in kernels)
