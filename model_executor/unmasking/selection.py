"""Choosing what a step fills, of the candidates of many requests at once."""

from collections.abc import Callable

import torch

from dllm_engine.model_executor.transfer import on_device

Rule = Callable[[torch.Tensor, torch.Tensor | float], torch.Tensor]
"""(confidences ``[..., n]`` in descending order, the request's value, a number or ``[..., 1]``) -> bool ``[..., n]``:
which of them a step fills."""


def first_of_all(ordered: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """The rule of a fixed count: the ``value`` most confident ones."""
    return (torch.arange(ordered.shape[-1], device=ordered.device) < value).expand(ordered.shape)


def drawn_below(ordered: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """The rule of policies that draw each position: those whose number, uniform in (0, 1), is below ``value``."""
    return ordered < value


def select(
    rule: Rule,
    confidence: torch.Tensor,
    requests: torch.Tensor,
    offsets: torch.Tensor,
    values: list[float],
    width: int,
) -> torch.Tensor:
    """Which candidates ``rule`` chooses in each request; of equally confident ones the first.

    Args:
        confidence: ``[num_candidates]``; −∞ for what must not be chosen.
        requests, offsets: int64 ``[num_candidates]``; whose it is, and a number below ``width`` that no other candidate
            of the request has and that ascends with its position.
        values: of each request.

    Returns:
        bool ``[num_candidates]``.
    """
    table = confidence.new_full((len(values), width), -torch.inf)
    table[requests, offsets] = confidence
    # What else is in the table must not matter, so that a request gets the same tokens in any batch: hence stable.
    ordered, order = table.sort(dim=1, descending=True, stable=True)
    per_request = on_device(values, confidence.device, confidence.dtype)[:, None]
    passes = rule(ordered, per_request) & (ordered > -torch.inf)
    return torch.zeros_like(passes).scatter_(1, order, passes)[requests, offsets]
