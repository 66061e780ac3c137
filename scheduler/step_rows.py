"""Rows that a step has left, and those that the sequences of one source may take."""

from collections import Counter
from collections.abc import Iterable, Sequence

_LEAST = 1 / 64
"""Share of the rows of a step that a source may take at least: with defaults of vLLM,
about as many as a GPU computes in the time of one.
"""


def turns_of(sources: Sequence[str]) -> list[int]:
    """Indices in the order in which sources take turns: each one's first, then each
    one's second.
    """
    seen: Counter[str] = Counter()
    turns = []
    for source in sources:
        turns.append(seen[source])
        seen[source] += 1
    return sorted(range(len(sources)), key=turns.__getitem__)


class StepRows:
    """Rows of one step, by source. Where requests of other sources run, several
    sequences of a source together take no more rows than those, but the least share of
    a step in any case. So they do not make the steps of others much longer."""

    def __init__(self, planned: Iterable[tuple[str, int]], max_rows: int) -> None:
        """``planned``: source and rows of each running request; ``max_rows``: of a
        step.
        """
        self.max_rows = self.left = max_rows
        self._planned: Counter[str] = Counter()
        for source, rows in planned:
            self._planned[source] += rows
        self._total = self._planned.total()
        self._taken: Counter[str] = Counter()

    def allow(self, source: str, rows: int) -> bool:
        """Return True if a source may take so many more rows. Its first sequence may
        take all that are left.
        """
        others = self._total - self._planned[source]
        most = max(others, int(_LEAST * self.max_rows)) if others else self.max_rows
        is_first = not self._taken[source]
        return rows <= self.left and (is_first or self._taken[source] + rows <= most)

    def take(self, source: str, rows: int) -> None:
        """Note the rows of a request that takes part in the step."""
        self._taken[source] += rows
        self.left -= rows

    def admit(self, source: str, rows: int) -> None:
        """Note the rows of a request that begins in the step."""
        self._planned[source] += rows
        self._total += rows
        self.take(source, rows)
