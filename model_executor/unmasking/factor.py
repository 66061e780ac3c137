"""``factor`` (Fast-dLLM, arXiv 2505.22618): the more positions at once, the surer each must be."""

import torch

from dllm_engine.model_executor.unmasking.parallel import ParallelUnmasking


def within_factor(ordered: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """The n most confident ones, n the largest with (n + 1) · (1 − the n-th confidence) < ``value``, or one."""
    numbers = torch.arange(1, ordered.shape[-1] + 1, device=ordered.device)
    # Both factors grow with n, so those that pass come first.
    passes = (numbers + 1) * (1 - ordered) < value
    passes[..., 0] = True
    return passes


FACTOR = ParallelUnmasking("factor", measures="probability", passes=within_factor)
