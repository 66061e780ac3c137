"""Functions that choose the positions for rules of parallel unmasking
(``UnmaskingRule.selects``).
"""

import torch
from torch import Tensor

from dllm_engine.model_executor.unmasking.statistics import LEAST_CONFIDENT

Value = Tensor | float


def at_least(ordered: Tensor, value: Value) -> Tensor:
    """Positions with a confidence of at least ``value``."""
    return ordered >= value


def above(ordered: Tensor, value: Value) -> Tensor:
    """Positions with a confidence above ``value``."""
    return ordered > value


def entropy_at_most(ordered: Tensor, value: Value) -> Tensor:
    """d3LLM: positions with an entropy of at most ``value``."""
    return ordered >= -value


def entropy_below(ordered: Tensor, value: Value) -> Tensor:
    """d3LLM for some families: positions with an entropy below ``value``."""
    return ordered > -value


def within_factor(ordered: Tensor, value: Value) -> Tensor:
    """Fast-dLLM: the n most confident positions, for the largest n with (n + 1) · (1 −
    n-th confidence) < ``value``.
    """
    numbers = torch.arange(1, ordered.shape[-1] + 1, device=ordered.device)
    # Both factors grow with n, so the positions that pass come first.
    return (numbers + 1) * (1 - ordered) < value


def within_bound(ordered: Tensor, value: Value) -> Tensor:
    """EB-Sampler (arXiv 2505.24857): positions of lowest entropy, while the total
    without the largest entropy is at most ``value``."""
    entropy = -ordered.clamp(max=0)
    # In ascending order the n-th entropy is the largest of the first n, so the sum of
    # the entropies before it counts.
    before = torch.nn.functional.pad(entropy[..., :-1].cumsum(-1), (1, 0))
    return (before <= value) & (ordered > LEAST_CONFIDENT)


def within_budget(ordered: Tensor, value: Value) -> Tensor:
    """SDAR (arXiv 2510.06303): positions of lowest entropy, while the total with the
    last one is less than ``value``.
    """
    return (-ordered.clamp(max=0)).cumsum(-1) < value
