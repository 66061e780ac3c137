"""``threshold`` (Fast-dLLM, arXiv 2505.22618): every position whose probability reaches the value."""

import torch

from dllm_engine.model_executor.unmasking.parallel import ParallelUnmasking


def select_reaching(confidence: torch.Tensor, value: float) -> torch.Tensor:
    """All positions at least as confident as ``value``, and always the most confident one."""
    reaching = confidence >= value
    reaching[confidence.argmax()] = True
    return reaching.nonzero()[:, 0]


# Fast-dLLM's Dream sampler takes a threshold with every policy and ignores it with most.
THRESHOLD = ParallelUnmasking("threshold", measures="probability", select=select_reaching, else_counted=True)
