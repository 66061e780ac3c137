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
    guaranteed: torch.Tensor | None = None,
    least: torch.Tensor | None = None,
    enough: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which candidates ``rule`` chooses in each request; of equally confident ones the first.

    Args:
        confidence: ``[num_candidates]``; −∞ for what must not be chosen.
        requests, offsets: int64 ``[num_candidates]``; whose it is, and a number below ``width`` that no other candidate
            of the request has and that ascends with its position.
        values: of each request, ``[num_requests]``.
        guaranteed: int64 ``[num_requests]``; one of the candidates with ``offsets`` below it is chosen at least, the
            most confident. None: leave it to the rule.
        least: int64 ``[num_requests]``; so many are chosen at least, the most confident. None: leave it to the rule.
        enough: int64 ``[num_requests]``; where the rule chooses fewer, only the most confident is. None: leave it to
            the rule.

    Returns:
        bool ``[num_candidates]``.
    """
    table = confidence.new_empty(values.shape[0], width).fill_(-torch.inf)
    table[requests, offsets] = confidence
    # What else is in the table must not matter, so that a request gets the same tokens in any batch: hence stable.
    ordered, order = table.sort(dim=1, descending=True, stable=True)
    passes = rule(ordered, values[:, None])
    if enough is not None:
        too_few = passes.sum(dim=1, keepdim=True) < enough[:, None]
        passes = passes & ~(too_few & (torch.arange(width, device=table.device) > 0))
    if least is not None:
        passes = passes | (torch.arange(width, device=table.device) < least[:, None])
    if guaranteed is not None:
        inside = order < guaranteed[:, None]
        first_inside = inside & (inside.cumsum(dim=1) == 1)
        passes = passes | (first_inside & ~(passes & inside).any(dim=1, keepdim=True))
    passes = passes & (ordered > -torch.inf)
    return torch.empty_like(passes).scatter_(1, order, passes)[requests, offsets]
