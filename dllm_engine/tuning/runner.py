"""Settings run on engines, one engine at a time."""

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dllm_engine.evaluation.answering import Cost, Request, answer_all
from dllm_engine.evaluation.comparison import NUM_WARMUP, LoadEngine, OneEngine
from dllm_engine.tuning.questions import Questions
from dllm_engine.tuning.space import Setting

if TYPE_CHECKING:
    from dllm_engine.llm import LLM


class Answers(NamedTuple):
    """The answers to some questions."""

    scores: list[float]
    """Between 0 and 1, in the order of the questions."""
    cost: Cost


class EngineRunner:
    """Answers questions and measures speed; an engine is started when a setting first needs it.

    Args:
        questions: what is asked.
        engine: arguments of ``LLM`` beside a setting's own.
        decoding: arguments of ``DiffusionParams`` beside a setting's own.
        at_once: requests in the engine while questions are answered.
        load: starts an engine.
    """

    def __init__(
        self, questions: Questions, engine: dict[str, Any], decoding: dict[str, Any], at_once: int, load: LoadEngine
    ) -> None:
        self.questions, self.at_once = questions, at_once
        self._starts: list[float] = []
        self._arguments, self._decoding = engine, decoding
        self._engine = OneEngine(load)

    @property
    def start_seconds(self) -> float:
        """What the start of an engine takes, with its first answers; the median, as a machine may falter."""
        return statistics.median(self._starts) if self._starts else 0.0

    def runs(self, setting: Setting) -> bool:
        """Whether the setting needs no other engine than the running one."""
        return self._engine.runs(self._arguments | setting.engine)

    def answer(self, setting: Setting, indices: range) -> Answers:
        """Ask these questions; raises ``ValueError`` where the setting cannot be run."""
        cost = Cost()

        def answer(llm: "LLM", requests: Sequence[Request]) -> list[str]:
            texts, taken = answer_all(llm, requests, self.at_once)
            cost.add(taken)
            return texts

        llm = self._started(setting)
        return Answers(self.questions.scores(llm, self._decoding | setting.decoding, indices, answer), cost)

    def measure(self, setting: Setting, count: int, batch: int) -> Cost:
        """Speed of the first ``count`` questions, ``batch`` at a time; few questions are asked several times."""
        llm = self._started(setting)
        requests = self._first_requests(llm, self._decoding | setting.decoding, count)
        return answer_all(llm, list(itertools.islice(itertools.cycle(requests), count)), batch)[1]

    def _first_requests(self, llm: "LLM", decoding: dict[str, Any], count: int) -> list[Request]:
        """Of at most ``count`` questions."""
        asked: list[Request] = []

        def note(llm: "LLM", requests: Sequence[Request]) -> list[str]:
            asked.extend(requests)
            return [""] * len(requests)

        self.questions.scores(llm, decoding, range(min(count, self.questions.size)), note)
        return asked

    def stop(self) -> None:
        """End the running engine."""
        self._engine.stop()

    def _started(self, setting: Setting) -> "LLM":
        arguments = self._arguments | setting.engine
        if self._engine.runs(arguments):
            return self._engine.of(arguments)
        start = time.monotonic()
        llm = self._engine.of(arguments)
        answer_all(llm, self._first_requests(llm, self._decoding, NUM_WARMUP), NUM_WARMUP)
        self._starts.append(time.monotonic() - start)
        return llm
