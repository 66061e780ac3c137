"""Queue of waiting requests, in the order of their turns."""

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from vllm.v1.request import Request

_FIRST = -1
"""Turn of a request that was preempted."""


class _Place(NamedTuple):
    priority: int
    turn: int
    arrival_time: float
    number: int
    """Tie-breaker: of equal places, the one that was added first comes first."""
    source: str
    request: Request


@dataclass
class _Source:
    num_waiting: int = 0
    last_turn: int = _FIRST


class WaitingQueue:
    """Waiting requests, first come, first served, or by priority. Several sequences may
    come from one HTTP request, their source. Each sequence takes a turn, so that a
    request that arrives later waits for one sequence of a source, not for all."""

    def __init__(self, *, by_priority: bool) -> None:
        self.by_priority = by_priority
        self._places: list[_Place] = []
        """Ascending."""
        self._place_of: dict[str, _Place] = {}
        """Places by request id."""
        self._sources: dict[str, _Source] = {}
        self._num_added = 0

    def add(self, request: Request, source: str) -> None:
        """Add a request behind the earlier requests, but before later turns of sources
        that wait already.
        """
        turn = self._turn(self._priority(request))
        if source in self._sources:
            turn = max(turn, self._sources[source].last_turn + 1)
        self._insert(
            request,
            source,
            turn,
            request.arrival_time if self.by_priority else 0.0,
            self._num_added,
        )

    def prepend(self, request: Request, source: str) -> None:
        """Add a request before all others of its priority."""
        self._insert(request, source, _FIRST, 0.0, -self._num_added)

    def remove(self, requests: Iterable[Request]) -> None:
        """Remove requests from the queue. Requests that are not in the queue are
        ignored.
        """
        for request in requests:
            place = self._place_of.pop(request.request_id, None)
            if place is None:
                continue
            del self._places[bisect.bisect_left(self._places, place)]
            source = self._sources[place.source]
            source.num_waiting -= 1
            if not source.num_waiting:
                del self._sources[place.source]

    def __iter__(self) -> Iterator[Request]:
        return (place.request for place in self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _priority(self, request: Request) -> int:
        return request.priority if self.by_priority else 0

    def _turn(self, priority: int) -> int:
        """The turn of the first waiting request of a priority."""
        first = bisect.bisect_left(self._places, (priority, 0))
        if first == len(self._places) or self._places[first].priority != priority:
            return 0
        return self._places[first].turn

    def _insert(
        self, request: Request, source: str, turn: int, arrival_time: float, number: int
    ) -> None:
        place = _Place(
            self._priority(request), turn, arrival_time, number, source, request
        )
        bisect.insort(self._places, place)
        self._place_of[request.request_id] = place
        self._num_added += 1
        waiting = self._sources.setdefault(source, _Source())
        waiting.num_waiting += 1
        waiting.last_turn = max(waiting.last_turn, turn)
