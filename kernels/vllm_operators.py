"""Operators that vLLM brings compiled."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def vllm_kernel(name: str, device: torch.device) -> Callable[..., Any] | None:
    """The operator ``name``, if it is loaded and has a kernel for the device: vLLM's builds are for one kind each."""
    operator = getattr(torch.ops._C, name, None)
    key = f"_C::{name}", device.type.upper()
    if operator is None or not torch._C._dispatch_has_kernel_for_dispatch_key(*key):
        return None
    overload: Callable[..., Any] = operator.default
    return overload


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up``, ``[num_rows, width]``, of ``[num_rows, 2 · width]`` with the gates first."""
    gate, up = gate_up.chunk(2, dim=-1)
    # vLLM's kernel for CPUs takes five times as long as PyTorch's two.
    if not gate_up.is_cuda or not hasattr(torch.ops._C, "silu_and_mul"):
        return F.silu(gate).mul_(up)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    torch.ops._C.silu_and_mul.default(out, gate_up)
    return out
