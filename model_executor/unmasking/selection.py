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
    """Choose candidates of each request by ``rule``; among equally confident ones the first.

    Args:
        confidence: ``[num_candidates]``; −∞ for a candidate that must not be chosen.
        requests, offsets: int64 ``[num_candidates]``; number of the request, and a number below ``width`` that is
            unique within the request and ascends with the position.
        values: of each request, ``[num_requests]``.
        guaranteed: int64 ``[num_requests]``; at least the most confident candidate with ``offsets`` below it is chosen.
            None: no guarantee.
        least: int64 ``[num_requests]``; minimum number of chosen candidates, the most confident. None: no minimum.
        enough: int64 ``[num_requests]``; if the rule chooses fewer, only the most confident candidate is chosen. None:
            no such number.

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
