"""Accuracy lost against plain decoding, on the same examples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95
"""Of a bound on one side. Settings are looked at many times, so that more than a twentieth of good ones is dropped."""
_DEVIATIONS = NormalDist().inv_cdf(CONFIDENCE)


@dataclass(frozen=True)
class Loss:
    """What a setting loses per example; scores lie between 0 and 1. Negative where it is better.

    The interval is that of a mean of differences between pairs, with two examples added, one lost and one won. For
    answers that are right or wrong it is the adjusted Wald interval of Bonett and Price (2012, Journal of Educational
    and Behavioral Statistics 37), which holds for few examples and for none that differ.
    """

    observed: float
    """Mean difference."""
    centre: float
    """With the two examples."""
    error: float
    """Standard error of the centre; infinite without examples."""

    @classmethod
    def between(cls, plain: Sequence[float], scores: Sequence[float]) -> "Loss":
        """Of the first examples, as many as have a score of both."""
        differences = [a - b for a, b in zip(plain, scores, strict=False)]
        if not differences:
            return cls(0.0, 0.0, math.inf)
        count = len(differences) + 2
        total = sum(differences)
        spread = (sum(value**2 for value in differences) + 2) / count - (total / count) ** 2
        return cls(total / len(differences), total / count, math.sqrt(spread / count))

    @property
    def lowest(self) -> float:
        return self.centre - _DEVIATIONS * self.error

    @property
    def highest(self) -> float:
        return self.centre + _DEVIATIONS * self.error

    def probability_within(self, limit: float) -> float:
        """How likely the loss is at most ``limit``. What a setting gains over plain decoding counts as luck: otherwise
        those with few examples would seem the safest."""
        if self.error in (0, math.inf):
            return 0.5 if self.error else float(self.centre <= limit)
        return NormalDist(max(self.centre, 0.0), self.error).cdf(limit)


NO_LOSS = Loss(0.0, 0.0, 0.0)
"""Of plain decoding itself."""
