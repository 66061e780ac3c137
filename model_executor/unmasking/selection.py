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
"""As ``UnmaskingRule.selects`` says."""


@cache
def parallel_rule(name: str) -> Rule:
    """The rule of parallel unmasking of a name."""
    return PARALLEL_RULES.function(name, PARALLEL_RULES[name].selects)


def first_of_all(ordered: Tensor, value: Tensor | float) -> Tensor:
    """A fixed count: the ``value`` most confident ones."""
    return (torch.arange(ordered.shape[-1], device=ordered.device) < value).expand(
        ordered.shape
    )


drawn_below: Rule = torch.lt
"""For policies that draw each position: those whose number, uniform in (0, 1), is below
the value.
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
    """Numbers of candidates that are chosen whatever a rule says, int64
    ``[num_requests]`` each; None where no request has such a bound.
    """

    guaranteed: Tensor | None = None
    """At least the most confident candidate with an offset below it is chosen."""
    least: Tensor | None = None
    """At least so many are chosen, the most confident."""
    enough: Tensor | None = None
    """If the rule chooses fewer, only the most confident candidate is chosen."""


def select(
    rule: Rule,
    confidence: Tensor,
    cells: Cells,
    values: Tensor,
    bounds: Bounds,
) -> Tensor:
    """Choose candidates of each request by ``rule``, among equally confident ones the
    first: bool ``[num_candidates]``.

    Args:
        confidence: ``[num_candidates]``; −∞ for a candidate that must not be chosen.
        values: of the rule, ``[num_requests]``.
    """
    requests, offsets, width = cells
    guaranteed, least, enough = bounds
    table = confidence.new_empty(values.shape[0], width).fill_(-torch.inf)
    table[requests, offsets] = confidence
    # What else is in the table must not matter, so that a request gets the same tokens
    # in any batch: hence stable.
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
    """The candidates of each request up to the first that ``stops``, that one with
    them; bool ``[num_candidates]`` both.
    """
    requests, offsets, width = cells
    table = torch.zeros(num_requests, width, dtype=torch.int64, device=stops.device)
    table[requests, offsets] = stops.long()
    before = table.cumsum(dim=1) - table
    return before[requests, offsets] == 0
