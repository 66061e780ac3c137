"""Which positions the rules of parallel unmasking fill, as ``UnmaskingRule.selects``
says.
"""

import torch
from torch import Tensor

from dllm_engine.model_executor.unmasking.statistics import LEAST_CONFIDENT

Value = Tensor | float


def at_least(ordered: Tensor, value: Value) -> Tensor:
    """Positions of a confidence of at least ``value``."""
    return ordered >= value


def above(ordered: Tensor, value: Value) -> Tensor:
    """Positions of a confidence above ``value``."""
    return ordered > value


def entropy_at_most(ordered: Tensor, value: Value) -> Tensor:
    """d3LLM: those of an entropy of at most ``value``."""
    return ordered >= -value


def entropy_below(ordered: Tensor, value: Value) -> Tensor:
    """d3LLM for some families: those of an entropy below ``value``."""
    return ordered > -value


def within_factor(ordered: Tensor, value: Value) -> Tensor:
    """Fast-dLLM: the n most confident ones, n the largest with (n + 1) · (1 − n-th
    confidence) < ``value``.
    """
    numbers = torch.arange(1, ordered.shape[-1] + 1, device=ordered.device)
    # Both factors grow with n, so those that pass come first.
    return (numbers + 1) * (1 - ordered) < value


def within_bound(ordered: Tensor, value: Value) -> Tensor:
    """EB-Sampler (arXiv 2505.24857): lowest entropy first while the total, excluding
    the largest, is at most ``value``."""
    entropy = -ordered.clamp(max=0)
    # In ascending order the largest of the first n is the n-th: what counts is the sum
    # of those before it.
    before = torch.nn.functional.pad(entropy[..., :-1].cumsum(-1), (1, 0))
    return (before <= value) & (ordered > LEAST_CONFIDENT)


def within_budget(ordered: Tensor, value: Value) -> Tensor:
    """SDAR (arXiv 2510.06303): lowest entropy first while the total, with its own, is
    less than ``value``.
    """
    return (-ordered.clamp(max=0)).cumsum(-1) < value
