"""RMSNorm with the sum before it, by vLLM's kernels and without, and the gate of the
feed-forward branch.
"""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.utils.torch_utils import set_default_torch_dtype

from dllm_engine.model_executor.models.mlp import silu_and_mul
from dllm_engine.model_executor.models.norm import Norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def norm_of(hidden_size, dtype, *, has_weight=True):
    with (
        set_current_vllm_config(VllmConfig()),
        set_default_torch_dtype(dtype),
        torch.device(DEVICE),
    ):
        norm = Norm(hidden_size, eps=1e-5, has_weight=has_weight)
    norm.weight.data.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (7, 200), (65, 512)])
@pytest.mark.parametrize("compiled", [True, False])
@torch.inference_mode()
def test_the_sum_is_bit_for_bit_that_of_two_steps(monkeypatch, compiled, shape, dtype):
    if not compiled:
        monkeypatch.setattr(torch.ops, "_C", object())
    norm = norm_of(shape[1], dtype)
    x, added = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(
        DEVICE, dtype
    )
    summed = x + added
    expected = norm(summed)
    plain = (
        summed.double()
        * (summed.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        * norm.weight.double()
    )
    result = norm(x, added)
    assert x.equal(summed), "the residual stream"
    for computed in (expected, result):
        torch.testing.assert_close(
            computed.double(), plain, rtol=4 * torch.finfo(dtype).eps, atol=1e-6
        )
    # A GPU's two kernels sum the squares in different orders.
    assert DEVICE == "cuda" or result.equal(expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compiled", [True, False])
@torch.inference_mode()
def test_a_norm_without_weights_reads_none(monkeypatch, dtype, compiled):
    """What vLLM keeps in their place is neither a parameter nor a buffer, and lost
    where weights are discarded.
    """
    if not compiled:
        monkeypatch.setattr(torch.ops, "_C", object())
    norm = norm_of(64, dtype, has_weight=False)
    x = torch.randn(9, 64).to(DEVICE, dtype)
    norm.weight.fill_(torch.nan)
    expected = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(
        norm(x).double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_is_that_of_vllms_kernel(dtype):
    """A GPU takes vLLM's kernel; on a CPU this is what it would compute."""
    gate_up = torch.randn(13, 2 * 48, generator=torch.Generator().manual_seed(0)).to(
        DEVICE, dtype
    )
    gate, up = gate_up.double().chunk(2, dim=-1)
    of_vllm = gate_up.new_empty(13, 48)
    torch.ops._C.silu_and_mul(of_vllm, gate_up)
    for result in (silu_and_mul(gate_up), of_vllm):
        expected = gate / (1 + (-gate).exp()) * up
        torch.testing.assert_close(
            result.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6
        )
