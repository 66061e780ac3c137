"""Choice of the positions that a step fills: by a rule of parallel unmasking, a fixed
count, or a draw per position.
"""

from collections.abc import Callable
from functools import cache

import torch

from dllm_engine.decoding.unmasking_policies import PARALLEL_RULES

Rule = Callable[[torch.Tensor, torch.Tensor | float], torch.Tensor]
"""As ``UnmaskingRule.selects`` says."""


@cache
def parallel_rule(name: str) -> Rule:
    """The rule of parallel unmasking of a name."""
    return PARALLEL_RULES.function(name, PARALLEL_RULES[name].selects)


def first_of_all(ordered: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """A fixed count: the ``value`` most confident ones."""
    return (torch.arange(ordered.shape[-1], device=ordered.device) < value).expand(
        ordered.shape
    )


drawn_below: Rule = torch.lt
"""For policies that draw each position: those whose number, uniform in (0, 1), is below
the value.
"""


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
    """Choose candidates of each request by ``rule``, among equally confident ones the
    first: bool ``[num_candidates]``.

    Args:
        confidence: ``[num_candidates]``; −∞ for a candidate that must not be chosen.
        requests, offsets: int64 ``[num_candidates]``; number of the request, and a
            number below ``width`` that is unique within the request and ascends with
            the position.
        values: of the rule, ``[num_requests]``.
        guaranteed: int64 ``[num_requests]``; at least the most confident candidate with
            ``offsets`` below it is chosen.
        least: int64 ``[num_requests]``; at least so many are chosen, the most
            confident.
        enough: int64 ``[num_requests]``; if the rule chooses fewer, only the most
            confident candidate is chosen.
    """
    table = confidence.new_empty(values.shape[0], width).fill_(-torch.inf)
    table[requests, offsets] = confidence
    # What else is in the table must not matter, so that a request gets the same tokens
    # in any batch: hence stable.
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
