"""The row budget of a step, and the rows that the sequences of one source may take."""

from collections import Counter
from collections.abc import Iterable

from dllm_engine.decoding.step_plan import StepPlan
from dllm_engine.scheduler.scheduled_request import ScheduledRequest

_LEAST = 1 / 64
"""The least share of a step's rows that a source may take. With vLLM's defaults, a GPU
computes about so many rows in the time of one row.
"""


PlannedStep = tuple[ScheduledRequest, StepPlan]


def in_turn(planned: list[PlannedStep], *, short_first: bool) -> list[PlannedStep]:
    """Planned steps in the order in which requests get rows. Sources take turns: first
    each one's first step, then each one's second.

    ``short_first``: among requests that have waited equally long, short steps come
    first.
    """
    if short_first:
        planned.sort(key=lambda pair: pair[1].max_rows)
    # Requests that were left out of the last steps come first: a row budget that is too
    # small for all must not starve any.
    planned.sort(key=lambda pair: pair[0].last_scheduled)
    seen: Counter[str] = Counter()
    turns = []
    for state, _ in planned:
        turns.append(seen[state.source])
        seen[state.source] += 1
    return [planned[i] for i in sorted(range(len(planned)), key=turns.__getitem__)]


class StepRows:
    """Rows of the steps, by source. If requests of other sources run, several sequences
    of a source together take no more rows of a step than the others do, or the least
    share of a step if that is more. So they do not make the steps of others much
    longer.

    A source that begins a sequence beside others then rests for a dispatch. After that,
    it may begin as many at once as it could have begun step by step. Meanwhile the
    steps of the others run without the scheduler.
    """

    def __init__(self, max_rows: int, steps_per_dispatch: int) -> None:
        """``max_rows``: row budget of a step."""
        self.max_rows = max_rows
        self._rest = steps_per_dispatch
        self._began: dict[str, int] = {}
        """The step in which each source last began a sequence beside others."""
        self.begin_step(0, ())

    def begin_step(self, number: int, planned: Iterable[tuple[str, int]]) -> None:
        """``number``: number of earlier steps. ``planned``: source and rows of each
        running request.
        """
        self._number = number
        self.left = self.max_rows
        self._planned: Counter[str] = Counter()
        for source, rows in planned:
            self._planned[source] += rows
        self._total = self._planned.total()
        self._taken: Counter[str] = Counter()
        self._new_rows: Counter[str] = Counter()
        """Rows of the sequences that begin in the step, by source."""
        oldest = number - 2 * self._rest
        self._began = {x: began for x, began in self._began.items() if began >= oldest}
        self._since = {x: number - began for x, began in self._began.items()}
        """Number of steps since then."""

    def _others(self, source: str) -> int:
        return self._total - self._planned[source]

    def resting(self) -> set[str]:
        """Sources that may not begin a sequence now."""
        return {
            source
            for source, num_steps in self._since.items()
            if num_steps < self._rest and self._others(source)
        }

    def allow(self, source: str, rows: int, num_steps: int = 1) -> bool:
        """Return True if a source may take ``rows`` more rows, for ``num_steps`` steps
        at once. Its first sequence may take all rows that are left.
        """
        others = self._others(source)
        least = int(_LEAST * self.max_rows)
        share = max(others, least) * num_steps if others else self.max_rows
        is_first = not self._taken[source]
        return rows <= self.left and (is_first or self._taken[source] + rows <= share)

    def may_begin(self, source: str, rows: int) -> bool:
        """Return True if a sequence of a source may begin with ``rows`` rows. Sources
        that begin sequences in the same step take turns.
        """
        is_next = self._taken[source] <= self._new_rows.total() - self._new_rows[source]
        num_steps = min(self._since.get(source, 1), self._rest)
        return (is_next and rows <= self.left) or self.allow(source, rows, num_steps)

    def take(self, source: str, rows: int) -> None:
        """Note the rows of a request that takes part in the step."""
        self._taken[source] += rows
        self.left -= rows

    def begin(self, source: str, rows: int) -> None:
        """Note the rows of a request that begins in the step."""
        if self._others(source):
            self._began[source] = self._number
        self._planned[source] += rows
        self._new_rows[source] += rows
        self._total += rows
        self.take(source, rows)
