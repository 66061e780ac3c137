"""RMSNorm, with the addition to the residual stream before it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.layernorm import RMSNorm


def vllm_kernel(name: str, device: torch.device) -> Callable[..., Any] | None:
    """vLLM's operator ``name``, if it is loaded and has a kernel for the device. A
    build of vLLM has kernels for one kind of device.
    """
    operator = getattr(torch.ops._C, name, None)
    key = f"_C::{name}", device.type.upper()
    if operator is None or not torch._C._dispatch_has_kernel_for_dispatch_key(*key):
        return None
    overload: Callable[..., Any] = operator.default
    return overload


class Norm(RMSNorm):
    """RMSNorm by vLLM's compiled kernels. On a CPU, vLLM's own class uses them only in
    a compiled graph.
    """

    def __init__(
        self, hidden_size: int, eps: float, *, has_weight: bool = True
    ) -> None:
        super().__init__(hidden_size, eps=eps, has_weight=has_weight)
        # Looked up once, because the search takes longer than a norm.
        device = self.weight.device
        self.kernel = vllm_kernel("rms_norm", device)
        # Not on a CPU in half precision: this kernel squares the sum before it is
        # rounded, so results differ.
        rounds = device.type != "cpu" or self.weight.dtype == torch.float32
        self.sum_kernel = vllm_kernel("fused_add_rms_norm", device) if rounds else None

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """RMSNorm of rows ``x`` ``[num_rows, hidden_size]``; with ``added``, a branch's
        output of the same shape, that of ``x + added``, which goes into ``x``. The
        result takes the memory of ``added``."""
        # A norm without weights has vLLM's ones, which `sleep(level=2)` discards for
        # good. So they are never read.
        weight = self.weight if self.has_weight else None
        eps = self.variance_epsilon
        fits = x.dtype == self.weight.dtype and x.is_contiguous()
        if added is not None:
            if self.sum_kernel is not None and fits and added.is_contiguous():
                self.sum_kernel(added, x, weight, eps)
                return added
            x += added
        if self.kernel is not None and fits:
            out = torch.empty_like(x)
            self.kernel(out, x, weight, eps)
            return out
        # Not vLLM's ``forward``: it may choose a kernel that is excluded here, or
        # missing.
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, weight, eps)
        return super().forward(x)

    # A norm has no hooks, and PyTorch's ``__call__`` takes as long as a small norm.
    __call__ = forward
