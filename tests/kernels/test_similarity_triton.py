"""The Triton kernel of similarity, on a GPU or interpreted, and compiled for a GPU where there is none."""

import pytest
import torch

pytest.importorskip("triton")

from dllm_engine.kernels import similarity
from dllm_engine.kernels.similarity import similarity_sums_reference, similarity_sums_with_triton
from tests.support.paged_cases import DEVICE, INTERPRETED, compile_launches, error, runs_triton

DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


@runs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("missing", [0.0, 0.4])
@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 24), (3, 64), (4, 96)])
def test_sums_equal_the_formula_and_read_only_what_is_retained(kv_heads, dim, missing, dtype):
    rows, slots_per_page = 60, 7
    pages = torch.full((40, 2, slots_per_page, dim), torch.nan, dtype=dtype, device=DEVICE)[:, 1]
    slots = torch.randperm(40 * slots_per_page, device=DEVICE)[: rows * kv_heads].view(rows, kv_heads)
    slots[torch.rand(rows, kv_heads, device=DEVICE) < missing] = -1
    named = slots[slots >= 0]
    pages[named // slots_per_page, named % slots_per_page] = torch.randn(len(named), dim, device=DEVICE).to(dtype)
    fresh = torch.randn(rows, 3 * kv_heads, dim, device=DEVICE).to(dtype)[:, kv_heads : 2 * kv_heads]
    sums = similarity_sums_with_triton(fresh, pages, slots)
    assert sums.dtype == torch.float32
    assert error(sums, similarity_sums_reference(fresh, pages, slots)) < 1e-5
    assert similarity_sums_with_triton(fresh[:0], pages, slots[:0]).shape == (3, 0)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize(("kv_heads", "dim"), [(32, 128), (2, 96), (1, 256)])
def test_launches_compile_for_a_gpu(monkeypatch, kv_heads, dim):
    (kernel,) = compile_launches(monkeypatch, similarity)
    fresh = torch.zeros(50, kv_heads, dim, dtype=torch.bfloat16)
    pages = fresh.new_zeros(10, 2, 16 * kv_heads, dim)[:, 1]
    similarity_sums_with_triton(fresh, pages, torch.zeros(50, kv_heads, dtype=torch.int64))
    assert len(kernel.shared_memory) == 1
