"""Operators that vLLM brings compiled."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from dllm_engine.kernels._operator import plain_on_cuda


def vllm_kernel(name: str, device: torch.device) -> Callable[..., Any] | None:
    """The operator ``name``, if it is loaded and has a kernel for the device: vLLM's builds are for one kind each.
    None on CUDA if it is in ``plain_on_cuda``."""
    if name in plain_on_cuda and device.type == "cuda":
        return None
    operator = getattr(torch.ops._C, name, None)
    if operator is None or not _has_kernel(name, device.type):
        return None
    overload: Callable[..., Any] = operator.default
    return overload


@cache
def _has_kernel(name: str, device_type: str) -> bool:
    """Of an operator that is loaded. Every layer asks, and PyTorch's answer takes longer than a small kernel."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"_C::{name}", device_type.upper())


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up``, ``[num_rows, width]``, of ``[num_rows, 2 · width]`` with the gates first."""
    gate, up = gate_up.chunk(2, dim=-1)
    # vLLM's kernel for CPUs takes five times as long as PyTorch's two.
    if not gate_up.is_cuda or "silu_and_mul" in plain_on_cuda or not hasattr(torch.ops._C, "silu_and_mul"):
        return F.silu(gate).mul_(up)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    torch.ops._C.silu_and_mul.default(out, gate_up)
    return out
