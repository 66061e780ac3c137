"""Operators that vLLM brings compiled."""

from collections.abc import Callable
from typing import Any

import torch


def vllm_cpu_kernel(name: str) -> Callable[..., Any] | None:
    """The operator ``name``, if it is loaded and has a kernel for CPUs: that of vLLM's CUDA wheels has none."""
    operator = getattr(torch.ops._C, name, None)
    if operator is None or not torch._C._dispatch_has_kernel_for_dispatch_key(f"_C::{name}", "CPU"):
        return None
    overload: Callable[..., Any] = operator.default
    return overload
