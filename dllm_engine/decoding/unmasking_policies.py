"""Number and order of the tokens that a step unmasks: schedules, policies, and
declarations of rules of parallel unmasking, without tensors.
``model_executor/unmasking/`` computes the values that policies and rules use."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from dllm_engine.decoding.option_types import Count, Options, Share
from dllm_engine.entry_points import EntryPointGroup

Measure = Literal["probability", "entropy", "margin", "noise", "position"]
"""Measure of a position's confidence: the probability of the predicted token, the
negative entropy, the difference between the probabilities of the two likeliest tokens,
a random number, or the position itself (the leftmost is the most confident)."""
WEIGHTED_MEASURES = ("probability", "margin")
"""Measures that a prior can weight, because their values are not negative."""
CONFIDENCES = (*WEIGHTED_MEASURES, "entropy")
"""Measures that depend on the predicted distribution."""


@dataclass(frozen=True)
class UnmaskingPolicy:
    """Unmasking policy: the measure by which a step orders positions. The most
    confident positions are filled first.
    """

    name: str
    measures: Measure
    """Measure that ranks positions."""
    tempered: bool = False
    """True: probabilities after temperature, top-p and top-k. False: plain softmax."""
    draws_each_position: bool = False
    """True to unmask each position with the step's ratio as probability, instead of a
    fixed number of the most confident ones.
    """
    takes_back: bool = False
    """True if a step predicts every position of its block that was a mask at first, and
    masks the least confident of them again, even decided ones.
    """


@dataclass(frozen=True)
class UnmaskingRule:
    """Rule of parallel unmasking: it determines the number of positions of a step from
    their confidences and one value of the request. Its entry point
    (``dllm.unmasking_rules``) names it.
    """

    measures: Measure
    """Measure that the rule compares. The request's policy must rank positions by the
    same measure.
    """
    selects: str
    """``module:function`` of the rule itself. It gets the confidences ``[..., n]`` of a
    request in descending order and the request's value, a number or ``[..., 1]``, and
    returns which of them a step fills, bool ``[..., n]``. Entropies come as negative
    numbers. It is named, not imported, so that commands do not load PyTorch.
    """
    option: Any = None
    """Type of the request option with the rule's name, with limits, such as
    ``Annotated[float, Field(ge=0, le=1)]``. None: requests cannot name the rule.
    """
    meaning: str = ""
    """Description of the option in help and docs. The first sentence must make sense
    alone.
    """
    else_counted: bool = False
    """True if policies with another measure keep their fixed count; False if such
    requests are refused.
    """
    untempered: bool = False
    """True if the rule uses the plain softmax in every family."""
    may_pass_none: bool = False
    """True if the rule may allow no position. Then the best one is filled
    (``UnmaskQuota.guaranteed``).
    """
    least_by_schedule: bool = True
    """True if ``steps_per_block`` sets the minimum number of positions of a step."""
    in_spans: bool = False
    """True if the rule fills spans of a block that passes determine
    (``SlowFastState``).
    """
    tuned: tuple[float, ...] = ()
    """Values that `dllm tune` tries, the most careful first."""

    def suits(self, policy: UnmaskingPolicy) -> bool:
        if policy.takes_back or (self.untempered and policy.tempered):
            return False
        return policy.measures == self.measures


UNMASKING_POLICIES: dict[str, UnmaskingPolicy] = {
    policy.name: policy
    for policy in (
        UnmaskingPolicy("low_confidence", "probability"),
        UnmaskingPolicy("random", "noise"),
        UnmaskingPolicy("low_entropy", "entropy"),
        UnmaskingPolicy("sequential", "position"),
        UnmaskingPolicy("maskgit_plus", "probability", tempered=True),
        UnmaskingPolicy("entropy", "entropy", tempered=True),
        UnmaskingPolicy("topk_margin", "margin", tempered=True),
        UnmaskingPolicy("origin", "noise", tempered=True, draws_each_position=True),
        UnmaskingPolicy("p2", "probability", tempered=True, takes_back=True),
    )
}
PARALLEL_RULES = EntryPointGroup(
    "dllm.unmasking_rules", UnmaskingRule, reserved=("guided", "one", "passes")
)
"""Rules of parallel unmasking by name. Our rules are in
``dllm_engine/unmasking_rules/``.
"""


def split_steps(steps: int, masks: Sequence[int]) -> tuple[int, ...]:
    """Split ``steps`` between blocks with these numbers of masks. Each block gets one
    step. The rest is split in proportion to the masks beyond the first, rounded by
    largest remainders, earlier blocks first. So one step per mask of the response is
    one step per mask in every block, and equal blocks get equally many steps."""
    others = [count - 1 for count in masks]
    extra = steps - len(masks)
    total = max(sum(others), 1)
    shares = [divmod(extra * count, total) for count in others]
    left_over = extra - sum(share for share, _ in shares)
    rounded_up = set(
        sorted(range(len(masks)), key=lambda block: -shares[block][1])[:left_over]
    )
    return tuple(
        1 + share + (block in rounded_up) for block, (share, _) in enumerate(shares)
    )


def uniform_count(block_size: int, steps: int, step: int) -> int:
    """Number of tokens that ``step`` unmasks in a block of ``block_size`` masked
    tokens, with the schedule ``uniform``.
    """
    return block_size // steps + (step < block_size % steps)


@lru_cache(maxsize=1024)
def rounded_counts(masks: int, steps: int) -> tuple[int, ...]:
    """Numbers of tokens that the steps of a block unmask, with the schedule
    ``rounded``: remaining masks divided by remaining steps, rounded, in float32 like
    dLLM's ``get_num_transfer_tokens``. Steps that would unmask no token are left out.
    """
    one = np.float32(1)
    counts = []
    left = masks
    for remaining in range(steps, 0, -1):
        before, after = (np.float32(n / steps) for n in (remaining, remaining - 1))
        kept = (one - (one - after)) / (one - (one - before))
        count = min(int(np.round(left * np.float64(one - kept))), left)
        counts.append(count)
        left -= count
    return tuple(count for count in counts if count)


@lru_cache(maxsize=64)
def _unmask_ratios(steps: int) -> tuple[float, ...]:
    import torch  # imported here, so that listing methods and options does not load it

    # float32 throughout, as in the authors' code: with float64, some counts are rounded
    # differently.
    times = torch.linspace(1.0, 1e-3, steps + 1, dtype=torch.float32)
    return tuple((1 - times[1:] / times[:-1]).tolist())


def timestep_ratio(steps: int, step: int) -> float:
    """Share of the remaining masks that ``step`` unmasks with the schedule
    ``timestep``; 1 at the last step.
    """
    return 1.0 if step >= steps - 1 else _unmask_ratios(steps)[step]


def timestep_count(num_masked: int, steps: int, step: int) -> int:
    """Number of tokens that ``step`` unmasks with the schedule ``timestep`` if
    ``num_masked`` are left; often 0 in the first steps.
    """
    return int(np.float32(num_masked) * np.float32(timestep_ratio(steps, step)))


def count_left(masks: int, steps: int, step: int) -> int:
    """Number of masks after ``step`` in a block that began with ``masks``, for policies
    that take tokens back (``p2``).
    """
    return int(np.float32(masks) * np.float32(1 - (step + 1) / steps))


class SlowFast(Options):
    """Options of SlowFast sampling (arXiv 2506.10848). Defaults are those of the
    authors' code; ``ModelFamily.slow_fast`` has the differences of some families. All
    confidences are probabilities of the plain softmax."""

    span_steps: Count = 6
    """Slow passes at the beginning of each span."""
    span_threshold: Share = 0.3
    """A slow pass estimates that the span ends after the farthest masked position of
    the block with this confidence.
    """
    span_window: Count = 2
    """Number of latest estimates that are compared. If they are not stable, the end is
    their mean.
    """
    span_variance: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """If the variance of these estimates is below this, they are stable, and the last
    one is the end. Models with shifted logits: the sample variance, at most this."""
    slow_threshold: Share = 0.9
    """A slow pass fills every position from the span's start to the block's end with
    this confidence, or the best.
    """
    fast_threshold: Share = 0.9
    """A fast pass fills every position of the span with this confidence, or the best.
    """
    slow_minimum: Count = 1
    """If fewer positions than this reach ``slow_threshold``, only the best one is
    filled.
    """
    fast_minimum: Count = 1
    """If fewer positions than this reach ``fast_threshold``, only the best one is
    filled.
    """


class SlowFastObservation(NamedTuple):
    """Observation of a pass of SlowFast sampling."""

    first_masked: int
    """Leftmost masked position after the pass; the end of the block if none is masked.
    """
    farthest: int
    """Rightmost position predicted with ``span_threshold``; −1 if none was observed."""


@dataclass(frozen=True)
class SlowFastState:
    """State of SlowFast sampling in a block. Slow passes look for the end of a span,
    fast passes fill it, and the next span begins there."""

    options: SlowFast
    shifts_logits: bool
    """True: the authors' code for models that shift logits, which uses the sample
    variance of the estimates and rounds their mean.
    """
    block_start: int
    start: int
    """Start of the span; every position of the block before it is decided."""
    end: int = -1
    """End of the span, according to the estimates so far."""
    settled: bool = False
    """True once the estimates were stable."""
    estimates: tuple[int, ...] = ()
    """Latest estimates, one per slow pass, until the end is settled."""
    num_slow: int = 0
    num_fast: int = 0
    """Slow and fast passes over the span so far."""

    @property
    def is_slow(self) -> bool:
        return self.num_slow < self.options.span_steps

    @property
    def passing(self) -> tuple[float, int]:
        """Confidence above which the next pass fills a position, and the number of such
        positions below which it fills only the best one.
        """
        options = self.options
        if self.is_slow:
            return options.slow_threshold, options.slow_minimum
        return options.fast_threshold, options.fast_minimum

    def after(self, observation: SlowFastObservation) -> "SlowFastState":
        """State after a pass. The number of slow passes is fixed, even if the end is
        settled earlier, as in the authors' code.
        """
        if not self.is_slow:
            state = replace(self, num_fast=self.num_fast + 1)
        else:
            state = replace(self, num_slow=self.num_slow + 1)
            if not self.settled:
                state = state._estimated(max(observation.farthest, self.start) + 1)
        if state.is_slow or observation.first_masked < state.end:
            return state
        return SlowFastState(
            self.options, self.shifts_logits, self.block_start, state.end
        )

    def _estimated(self, end: int) -> "SlowFastState":
        """State after one more estimate of the span's end."""
        count = self.options.span_window
        latest = (*self.estimates, end)[-count:]
        settled = len(latest) == count and self._is_stable(latest)
        end = end if settled else self._mean(latest)
        return replace(self, estimates=latest, settled=settled, end=end)

    def _is_stable(self, estimates: Sequence[int]) -> bool:
        if self.shifts_logits:
            return (
                len(estimates) == 1
                or statistics.variance(estimates) <= self.options.span_variance
            )
        return statistics.pvariance(estimates) < self.options.span_variance

    def _mean(self, estimates: Sequence[int]) -> int:
        """Mean of the estimates. As in the authors' code, the length from the block's
        start is rounded down, or with shifted logits to the nearest integer, halves to
        even.
        """
        length = statistics.mean(estimates) - self.block_start
        return self.block_start + (
            round(length) if self.shifts_logits else math.floor(length)
        )
