"""``factor`` (Fast-dLLM, arXiv 2505.22618): the more positions at once, the surer each must be."""

import torch

from dllm_engine.model_executor.unmasking.parallel import ParallelUnmasking


def select_by_factor(confidence: torch.Tensor, value: float) -> torch.Tensor:
    """The n most confident positions, n the largest with (n + 1) · (1 − the n-th confidence) < ``value``, or one."""
    ordered, order = confidence.sort(descending=True, stable=True)
    numbers = torch.arange(1, ordered.numel() + 1, device=ordered.device)
    # Both factors grow with n, so those that pass come first.
    passes = (numbers + 1) * (1 - ordered) < value
    passes[0] = True
    return order[passes]


FACTOR = ParallelUnmasking("factor", measures="probability", select=select_by_factor)
