"""Distributions as a few numbers."""

from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the nearest ranks; with few values the high ones are near the maximum."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Distribution:
    """Of ``of`` values."""

    median: float
    p90: float
    p99: float
    of: int

    @classmethod
    def of_values(cls, values: Sequence[float]) -> "Distribution | None":
        """None where there is nothing."""
        if not values:
            return None
        return cls(percentile(values, 50), percentile(values, 90), percentile(values, 99), len(values))
