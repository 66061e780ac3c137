"""The Triton kernel of the rotary embedding, on a GPU or interpreted, and compiled for a GPU where there is none."""

import pytest
import torch

pytest.importorskip("triton")

from dllm_engine.kernels import rotary
from dllm_engine.kernels.rotary import rotate_reference, rotate_with_triton
from tests.support.paged_cases import DEVICE, INTERPRETED, compile_launches, runs_triton

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3} | ({} if INTERPRETED else {torch.bfloat16: 1e-2})


@runs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_rows", "num_heads", "head_dim"), [(5, 3, 64), (1, 1, 2), (9, 2, 96), (0, 4, 32)])
def test_rotation_is_that_of_the_formula(num_rows, num_heads, head_dim, dtype):
    fused = torch.randn(num_rows, (num_heads + 1) * head_dim, device=DEVICE).to(dtype)
    x = fused[:, head_dim:].unflatten(-1, (num_heads, head_dim))
    angles = torch.rand(num_rows, head_dim // 2, device=DEVICE) * 5000
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    before = fused.clone()
    expected = rotate_reference(x, cos_sin)
    rotate_with_triton(x, cos_sin)
    assert (x.double() - expected).norm() <= TOLERANCES[dtype] * expected.norm()
    assert fused[:, :head_dim].equal(before[:, :head_dim])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize(("num_heads", "head_dim"), [(32, 128), (4, 128)])
def test_launches_compile_for_a_gpu(monkeypatch, num_heads, head_dim):
    kernels = compile_launches(monkeypatch, rotary)
    rotate_with_triton(torch.zeros(20, num_heads, head_dim, dtype=torch.bfloat16), torch.zeros(20, head_dim))
    assert [len(kernel.shared_memory) for kernel in kernels] == [1]
