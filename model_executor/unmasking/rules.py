"""Choice of the positions that a step fills: rules of parallel unmasking, a fixed
count, and a draw per position.

A new rule of parallel unmasking is a function here, its name in ``SELECTION_RULES``,
and its row in ``dllm_engine/decoding/unmasking_policies.py``.
"""

from collections.abc import Callable

import torch

from dllm_engine.model_executor.unmasking.statistics import LEAST_CONFIDENT

Rule = Callable[[torch.Tensor, torch.Tensor | float], torch.Tensor]
"""(confidences ``[..., n]`` in descending order, the request's value, a number or
``[..., 1]``) -> bool ``[..., n]``: which of them a step fills. Confidences of rules
about entropy are negative entropies."""


def first_of_all(ordered: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """A fixed count: the ``value`` most confident ones."""
    return (torch.arange(ordered.shape[-1], device=ordered.device) < value).expand(
        ordered.shape
    )


drawn_below: Rule = torch.lt
"""For policies that draw each position: those whose number, uniform in (0, 1), is below
the value.
"""


def within_factor(ordered: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """Fast-dLLM: the n most confident ones, n the largest with (n + 1) · (1 − n-th
    confidence) < ``value``.
    """
    numbers = torch.arange(1, ordered.shape[-1] + 1, device=ordered.device)
    # Both factors grow with n, so those that pass come first.
    return (numbers + 1) * (1 - ordered) < value


def within_bound(ordered: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """EB-Sampler (arXiv 2505.24857): lowest entropy first while the total, excluding
    the largest, is at most ``value``."""
    entropy = -ordered.clamp(max=0)
    # In ascending order the largest of the first n is the n-th: what counts is the sum
    # of those before it.
    before = torch.nn.functional.pad(entropy[..., :-1].cumsum(-1), (1, 0))
    return (before <= value) & (ordered > LEAST_CONFIDENT)


def within_budget(ordered: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """SDAR (arXiv 2510.06303): lowest entropy first while the total, with its own, is
    less than ``value``.
    """
    return (-ordered.clamp(max=0)).cumsum(-1) < value


SELECTION_RULES: dict[str, Rule] = {
    "threshold": torch.ge,
    "factor": within_factor,
    "entropy_bound": within_bound,
    "entropy_budget": within_budget,
    "margin": torch.ge,
    "slow_fast": torch.ge,
    "exceeded_threshold": torch.gt,
    # An entropy of at most the value, or below it.
    "entropy_threshold": lambda ordered, value: ordered >= -value,
    "strict_entropy_threshold": lambda ordered, value: ordered > -value,
}
"""By the names in ``dllm_engine/decoding/unmasking_policies.py``, which says whose they are, and
by which of them a step fills one position at least."""


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
        ``offsets`` below it is chosen. least: int64 ``[num_requests]``; at least so
        many are chosen, the most confident.
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
