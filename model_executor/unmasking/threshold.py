"""``threshold`` (Fast-dLLM, arXiv 2505.22618): every position whose probability reaches the value.

ES-dLLM's (arXiv 2603.10088) must exceed it; its plan asks for that rule in place of the other.
"""

import torch

from dllm_engine.model_executor.unmasking.parallel import ParallelUnmasking


def select_reaching(confidence: torch.Tensor, value: float) -> torch.Tensor:
    """All positions at least as confident as ``value``, and always the most confident one."""
    reaching = confidence >= value
    reaching[confidence.argmax()] = True
    return reaching.nonzero()[:, 0]


def select_exceeding(confidence: torch.Tensor, value: float) -> torch.Tensor:
    """All positions more confident than ``value``, and always the most confident one."""
    exceeding = confidence > value
    exceeding[confidence.argmax()] = True
    return exceeding.nonzero()[:, 0]


# Fast-dLLM's Dream sampler takes a threshold with every policy and ignores it with most.
THRESHOLD = ParallelUnmasking("threshold", measures="probability", select=select_reaching, else_counted=True)
EXCEEDED_THRESHOLD = ParallelUnmasking(
    "exceeded_threshold", measures="probability", select=select_exceeding, else_counted=True
)
