"""Choice of the positions that a step fills: by a rule of parallel unmasking, a fixed
count, or a draw per position.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from dllm_engine.decoding.unmasking_policies import PARALLEL_RULES

Rule = Callable[[Tensor, Tensor | float], Tensor]
"""Function of a rule; ``UnmaskingRule.selects`` describes it."""


@cache
def parallel_rule(name: str) -> Rule:
    """The rule of parallel unmasking with this name."""
    return PARALLEL_RULES.function(name, PARALLEL_RULES[name].selects)


def first_of_all(ordered: Tensor, value: Tensor | float) -> Tensor:
    """Rule of a fixed count: the ``value`` most confident candidates."""
    return (torch.arange(ordered.shape[-1], device=ordered.device) < value).expand(
        ordered.shape
    )


drawn_below: Rule = torch.lt
"""Rule for policies that draw each position: candidates whose uniform number in (0, 1)
is below the value.
"""


class Cells(NamedTuple):
    """Cells of candidates in a table with a row per request."""

    requests: Tensor
    """int64 ``[num_candidates]``"""
    offsets: Tensor
    """int64 ``[num_candidates]``: column, which is unique within the request and
    ascends with the position.
    """
    width: int
    """Number of columns."""


class Bounds(NamedTuple):
    """Bounds on the candidates that are chosen, whatever the rule allows; int64
    ``[num_requests]`` each. None: no request has such a bound.
    """

    guaranteed: Tensor | None = None
    """At least one candidate with an offset below this is chosen: the most confident
    one, if the rule allows none of them.
    """
    least: Tensor | None = None
    """At least this number of candidates is chosen, the most confident ones first."""
    enough: Tensor | None = None
    """If the rule allows fewer candidates than this, only the most confident one is
    chosen.
    """


def select(
    rule: Rule,
    confidence: Tensor,
    cells: Cells,
    values: Tensor,
    bounds: Bounds,
) -> Tensor:
    """Choose candidates of each request by ``rule``: bool ``[num_candidates]``. Among
    equally confident candidates the first one wins.

    Args:
        confidence: ``[num_candidates]``; −∞ for a candidate that must not be chosen.
        values: value of the rule for each request, ``[num_requests]``.
    """
    requests, offsets, width = cells
    guaranteed, least, enough = bounds
    table = confidence.new_empty(values.shape[0], width).fill_(-torch.inf)
    table[requests, offsets] = confidence
    # The sort is stable, so that a request gets the same tokens in any batch, whatever
    # else is in the table.
    ordered, order = table.sort(dim=1, descending=True, stable=True)
    allowed = rule(ordered, values[:, None])
    if enough is not None:
        too_few = allowed.sum(dim=1, keepdim=True) < enough[:, None]
        allowed = allowed & ~(too_few & (torch.arange(width, device=table.device) > 0))
    if least is not None:
        allowed = allowed | (torch.arange(width, device=table.device) < least[:, None])
    if guaranteed is not None:
        inside = order < guaranteed[:, None]
        first_inside = inside & (inside.cumsum(dim=1) == 1)
        allowed = allowed | (
            first_inside & ~(allowed & inside).any(dim=1, keepdim=True)
        )
    allowed = allowed & (ordered > -torch.inf)
    return torch.empty_like(allowed).scatter_(1, order, allowed)[requests, offsets]


def up_to_first(stops: Tensor, cells: Cells, num_requests: int) -> Tensor:
    """The candidates of each request up to the first one in ``stops``, inclusive.
    Argument and result are bool ``[num_candidates]``.
    """
    requests, offsets, width = cells
    table = torch.zeros(num_requests, width, dtype=torch.int64, device=stops.device)
    table[requests, offsets] = stops.long()
    before = table.cumsum(dim=1) - table
    return before[requests, offsets] == 0
