"""Choosing what a step fills, of the candidates of many requests at once."""

import torch

from dllm_engine.model_executor.unmasking.rules import Rule


def select(
    rule: Rule,
    confidence: torch.Tensor,
    requests: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """Which candidates ``rule`` chooses in each request; of equally confident ones the first.

    Args:
        confidence: ``[num_candidates]``; −∞ for what must not be chosen.
        requests, offsets: int64 ``[num_candidates]``; whose it is, and a number below ``width`` that no other candidate
            of the request has and that ascends with its position.
        values: of each request, ``[num_requests]``.

    Returns:
        bool ``[num_candidates]``.
    """
    table = confidence.new_full((values.shape[0], width), -torch.inf)
    table[requests, offsets] = confidence
    # What else is in the table must not matter, so that a request gets the same tokens in any batch: hence stable.
    ordered, order = table.sort(dim=1, descending=True, stable=True)
    passes = rule(ordered, values[:, None]) & (ordered > -torch.inf)
    return torch.zeros_like(passes).scatter_(1, order, passes)[requests, offsets]
