"""Plain kernels take CUDA tensors too, where an operator's own kernel is not to be trusted."""

import pytest
import torch
import torch.nn.functional as F

from dllm_engine.check import operators
from dllm_engine.check.checks import OK, run_checks
from dllm_engine.check.operators import Sizes, operator_checks
from dllm_engine.kernels import vllm_operators
from dllm_engine.kernels._operator import plain_on_cuda
from dllm_engine.kernels.similarity import similarity_sums
from dllm_engine.kernels.slots import write_slots
from tests.support.pretended_cuda import CUDA, pretended_cuda

SIZES = Sizes(num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=64, vocab_size=150, slots_per_page=16)
OF_VLLM = ("silu_and_mul", "rms_norm", "fused_add_rms_norm")
CHECKS = [each for each in operator_checks(CUDA, SIZES, (torch.float32, torch.bfloat16)) if each.name not in OF_VLLM]


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(operators, "PAGED", (([1, 3], [40, 70]), ([32, 3], [9, 40])))
    with pretended_cuda(monkeypatch):
        yield CUDA
    plain_on_cuda.clear()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.name}-{check.case.split(',')[0]}")
def test_every_plain_kernel_computes_on_a_cuda_device(cuda, check):
    plain_on_cuda.add(check.name.split(",")[0])
    (outcome,) = run_checks([check])
    assert outcome.result == OK, outcome.traceback or outcome


def test_operators_that_are_not_named_launch_their_own_kernel(cuda, monkeypatch):
    def launched(*arguments):
        raise LookupError

    for each in (similarity_sums, write_slots):
        monkeypatch.setattr(each, "triton_kernel", launched)
    fresh, pages = torch.ones(3, 2, 8, device=cuda), torch.ones(2, 4, 8, device=cuda)
    slots = torch.arange(6, device=cuda).view(3, 2)
    plain_on_cuda.add("similarity_sums")
    assert similarity_sums(fresh, pages, slots).tolist() == [[16.0] * 3] * 3
    with pytest.raises(LookupError):
        write_slots(fresh, pages, slots)


def test_vllms_operators_are_left_out_on_cuda_devices_alone(cuda, monkeypatch):
    monkeypatch.setattr(vllm_operators, "_has_kernel", lambda name, device_type: True)
    monkeypatch.setattr(torch.ops, "_C", torch.ops.aten)
    cpu = torch.device("cpu")
    assert vllm_operators.vllm_kernel("rms_norm", CUDA) is not None
    plain_on_cuda.update({"rms_norm", "silu_and_mul"})
    assert vllm_operators.vllm_kernel("rms_norm", CUDA) is None
    assert vllm_operators.vllm_kernel("rms_norm", cpu) is not None
    gate_up = torch.randn(3, 8, device=cuda)
    gate, up = gate_up.chunk(2, dim=-1)
    assert vllm_operators.silu_and_mul(gate_up).equal(F.silu(gate) * up)


def test_tensors_of_the_cpu_beside_those_of_a_device_are_noticed(cuda):
    x = torch.ones(3, device=cuda)
    for wrong in (lambda: x + torch.arange(3), lambda: torch.cat((x, torch.ones(1))), x.numpy):
        with pytest.raises((RuntimeError, TypeError)):
            wrong()
    assert (x + torch.arange(3, device=x.device)).tolist() == [1, 2, 3]
    assert x[torch.tensor([1])].is_cuda
    assert not x.cpu().is_cuda
