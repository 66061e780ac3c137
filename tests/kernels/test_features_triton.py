"""The Triton kernels of features, on a GPU or interpreted, and compiled for a GPU where there is none."""

import pytest
import torch

pytest.importorskip("triton")

from dllm_engine.kernels import features
from dllm_engine.kernels.features import (
    add_features_reference,
    add_features_with_triton,
    feature_rows,
    read_features_reference,
    read_features_with_triton,
    write_features_reference,
    write_features_with_triton,
)
from tests.support.paged_cases import DEVICE, INTERPRETED, compile_launches, runs_triton

DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


@runs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 150, 1100])
def test_rows_are_written_read_and_added_and_nothing_else_is_touched(width, dtype):
    memory = torch.full((30, 2, 35, 16), torch.nan, dtype=dtype, device=DEVICE)
    rows = feature_rows(memory, width)
    slots = torch.randperm(30 * rows.shape[1], device=DEVICE)[:25]
    slots[::4] = -1
    values, hidden = torch.randn(25, 2 * width + 5, device=DEVICE).to(dtype)[:, 5:].split(width, dim=1)

    expected = write_features_reference(values, rows, slots)
    write_features_with_triton(values, rows, slots)
    torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)
    assert int((~memory.isnan()).sum()) == int((slots >= 0).sum()) * width

    read = read_features_with_triton(rows, slots)
    torch.testing.assert_close(read, read_features_reference(rows, slots), rtol=0, atol=0)

    expected = add_features_reference(hidden, rows, slots)
    add_features_with_triton(hidden, rows, slots)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=0)


@runs_triton
def test_no_rows():
    memory = torch.full((2, 2, 4, 8), torch.nan, device=DEVICE)
    rows, none = feature_rows(memory, 16), memory.new_zeros(0, 16)
    slots = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    write_features_with_triton(none, rows, slots)
    add_features_with_triton(none, rows, slots)
    assert read_features_with_triton(rows, slots).shape == (0, 16)
    assert bool(memory.isnan().all())


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize("width", [3584, 4096])
def test_launches_compile_for_a_gpu(monkeypatch, width):
    kernels = compile_launches(monkeypatch, features)
    rows = feature_rows(torch.zeros(3, 2, 16 * 4, 128, dtype=torch.bfloat16), width)
    hidden, slots = rows.new_zeros(20, width), torch.zeros(20, dtype=torch.int64)
    add_features_with_triton(hidden, rows, slots)
    write_features_with_triton(hidden, rows, slots)
    read_features_with_triton(rows, slots)
    assert [len(kernel.shared_memory) for kernel in kernels] == [1, 1, 1]
