"""Limit on the refreshes of long requests, so that they do not delay short requests
(docs/reference.md, ``refresh_ratio``).

With the ratio ρ, a request that refreshes owes the rows of that refresh. It may refresh
again once requests of at most a quarter of its canvas have run 1/ρ times as many rows.
So while these requests run for a time T, it refreshes for at most about ρ·T, plus one
refresh. A refresh is delayed, never dropped: the smallest requests owe nothing, and the
rows that they run pay for the others. Requests of similar size refresh when they are
due, together if possible.
"""

import itertools
from bisect import bisect_right
from collections.abc import Mapping

from dllm_engine.decoding.step_plan import RefreshState, StepPlan

_MUCH_SMALLER = 4
"""A request's refreshes wait for requests whose canvas is smaller by at least this
factor.
"""


class RefreshBudget:
    """Decision which refreshes run in a step. All amounts are rows."""

    def __init__(self, ratio: float | None) -> None:
        """``ratio``: rows of a request's refreshes per row of smaller requests; None:
        no limit.
        """
        self.ratio = ratio
        self._owed: dict[str, float] = {}

    def begin_step(self, canvases: Mapping[str, int]) -> None:
        """Forget what requests owe if no smaller request runs beside them.
        ``canvases``: canvas length of each running request.
        """
        smallest = min(canvases.values(), default=0)
        for request_id in list(self._owed):
            if canvases[request_id] < _MUCH_SMALLER * smallest:
                del self._owed[request_id]

    def binds(self, canvases: Mapping[str, int]) -> bool:
        """Return True if one of these requests might have to wait."""
        return self.ratio is not None and max(canvases.values()) >= _MUCH_SMALLER * min(
            canvases.values()
        )

    def allows(self, request_id: str, plan: StepPlan) -> bool:
        return plan.state is RefreshState.REUSE or request_id not in self._owed

    def end_step(
        self, plans: Mapping[str, StepPlan], canvases: Mapping[str, int]
    ) -> None:
        """Charge refreshes of the step, and pay for earlier ones. ``canvases``: as for
        ``begin_step``, with the requests that the step has admitted.
        """
        if self.ratio is None:
            return
        for request_id, plan in plans.items():
            if plan.state is not RefreshState.REUSE:
                self._owed[request_id] = plan.max_rows
        ran = sorted(
            (canvases[request_id], plan.max_rows) for request_id, plan in plans.items()
        )
        sizes = [size for size, _ in ran]
        rows = list(itertools.accumulate((rows for _, rows in ran), initial=0))
        for request_id in list(self._owed):
            self._owed[request_id] -= (
                self.ratio
                * rows[bisect_right(sizes, canvases[request_id] / _MUCH_SMALLER)]
            )
            if self._owed[request_id] <= 0:
                del self._owed[request_id]

    def forget(self, request_id: str) -> None:
        self._owed.pop(request_id, None)
