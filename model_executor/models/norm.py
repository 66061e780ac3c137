"""RMSNorm, and the sum of the residual stream before it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.layernorm import RMSNorm


def vllm_kernel(name: str, device: torch.device) -> Callable[..., Any] | None:
    """The operator ``name``, if it is loaded and has a kernel for the device: vLLM's
    builds are for one kind each.
    """
    operator = getattr(torch.ops._C, name, None)
    key = f"_C::{name}", device.type.upper()
    if operator is None or not torch._C._dispatch_has_kernel_for_dispatch_key(*key):
        return None
    overload: Callable[..., Any] = operator.default
    return overload


class Norm(RMSNorm):
    """vLLM's RMSNorm, by its compiled kernels: on a CPU it uses them only as part of a
    compiled graph.
    """

    def __init__(
        self, hidden_size: int, eps: float, *, has_weight: bool = True
    ) -> None:
        super().__init__(hidden_size, eps=eps, has_weight=has_weight)
        # Looked up once: a norm is small beside the search for it.
        device = self.weight.device
        self.kernel = vllm_kernel("rms_norm", device)
        # On a CPU and in half precision, this kernel squares the sum before it is
        # rounded, and the results differ.
        rounds = device.type != "cpu" or self.weight.dtype == torch.float32
        self.sum_kernel = vllm_kernel("fused_add_rms_norm", device) if rounds else None

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """RMSNorm of rows ``x`` ``[num_rows, hidden_size]``; with ``added``, a branch's
        output of the same shape, that of ``x + added``, which goes into ``x``. The
        result takes the memory of ``added``."""
        # Without weights vLLM keeps ones, which `sleep(level=2)` discards for good:
        # they are never read.
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
        # VLLM's own choice may be a kernel that was not to be taken, or is not there.
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, weight, eps)
        return super().forward(x)

    # Nobody hooks into a norm, and PyTorch's way to ``forward`` takes as long as a
    # small one.
    __call__ = forward
