"""Probes that wait for a step."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from dllm_engine.decoding.probe import Logprobs, Probe
from dllm_engine.scheduler.model_weights import ModelWeights
from dllm_engine.scheduler.step_rows import StepRows

_SOURCE = "probes"

Result = tuple[list[Logprobs] | None, int]
"""Answers to the probes of a call (None if it was dropped), and how often the weights
have changed.
"""


@dataclass(eq=False)
class _Call:
    """Probes of one call, and their answers so far."""

    num_probes: int
    waiting: deque[Probe]
    result: Future[Result] = field(default_factory=Future)
    answers: list[Logprobs] = field(default_factory=list)


class ProbeQueue:
    """Calls whose probes wait for steps. They take turns: each call gets one probe into
    a step, then each its next one.
    """

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights
        self._calls: dict[str, _Call] = {}
        """Calls without a result, by name."""
        self._turns: deque[_Call] = deque()
        """Calls with waiting probes, next turn first."""
        self._running: deque[list[_Call]] = deque()
        """For each step that runs, the calls of its probes."""
        self.is_due = False
        """True if the last step had no room for a probe. Then the next step takes probes
        before requests.
        """

    def __len__(self) -> int:
        """Number of calls without a result."""
        return len(self._calls)

    def add(self, name: str, probes: Sequence[Probe]) -> Future[Result]:
        """Add the probes of a call; returns its future result."""
        call = _Call(len(probes), deque(probes))
        self._calls[name] = call
        self._turns.append(call)
        return call.result

    def drop(self, name: str) -> None:
        """Drop a call. Nothing happens if it has a result already."""
        if (call := self._calls.pop(name, None)) is not None:
            if call.waiting:
                self._turns.remove(call)
            call.result.set_result((None, self._weights.num_changes))

    def drop_all(self) -> None:
        """Drop all calls, whose answers would come from two sets of weights."""
        for name in [*self._calls]:
            self.drop(name)

    def take(self, rows: StepRows) -> list[Probe]:
        """Remove and return the probes that a step has room for."""
        probes: list[Probe] = []
        calls: list[_Call] = []
        while self._turns:
            call = self._turns[0]
            # A canvas that is longer than a step has a step of its own.
            num_rows = min(len(call.waiting[0].canvas), rows.max_rows)
            if not rows.allow(_SOURCE, num_rows):
                break
            rows.take(_SOURCE, num_rows)
            probes.append(call.waiting.popleft())
            calls.append(call)
            self._turns.popleft()
            if call.waiting:
                self._turns.append(call)
        self.is_due = bool(self._turns) and not probes
        if probes:
            self._running.append(calls)
        return probes

    def take_in(self, answers: Sequence[Logprobs]) -> None:
        """Take the answers of the step that has ended; calls with all answers end."""
        for call, answer in zip(self._running.popleft(), answers, strict=True):
            call.answers.append(answer)
        for name, call in [*self._calls.items()]:
            if len(call.answers) == call.num_probes:
                del self._calls[name]
                call.result.set_result((call.answers, self._weights.num_changes))
