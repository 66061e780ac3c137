"""``threshold`` (Fast-dLLM, arXiv 2505.22618): every position whose probability reaches the value.

ES-dLLM's (arXiv 2603.10088) must exceed it; its plan asks for that rule in place of the other.
"""

import torch

from dllm_engine.model_executor.unmasking.parallel import ParallelUnmasking


def reaching(ordered: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """All at least as confident as ``value``, and always the most confident one."""
    passes = ordered >= value
    passes[..., 0] = True
    return passes


def exceeding(ordered: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """All more confident than ``value``, and always the most confident one."""
    passes = ordered > value
    passes[..., 0] = True
    return passes


# Fast-dLLM's Dream sampler takes a threshold with every policy and ignores it with most.
THRESHOLD = ParallelUnmasking("threshold", measures="probability", passes=reaching, else_counted=True)
EXCEEDED_THRESHOLD = ParallelUnmasking(
    "exceeded_threshold", measures="probability", passes=exceeding, else_counted=True
)
