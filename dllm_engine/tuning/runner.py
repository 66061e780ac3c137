"""Settings run on engines, one engine at a time."""

import itertools
import statistics
import time
from typing import TYPE_CHECKING, Any

from dllm_engine.evaluation.answering import Cost, answer_all
from dllm_engine.evaluation.comparison import NUM_WARMUP, LoadEngine, OneEngine
from dllm_engine.tuning.questions import Answers, Questions
from dllm_engine.tuning.space import Setting

if TYPE_CHECKING:
    from dllm_engine.llm import LLM


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
        llm = self._started(setting)
        return self.questions.answer(llm, self._decoding | setting.decoding, indices, self.at_once)

    def measure(self, setting: Setting, count: int, batch: int) -> Cost:
        """Speed of the first ``count`` questions, ``batch`` at a time; few questions are asked several times."""
        llm = self._started(setting)
        first = range(min(count, self.questions.size))
        requests = self.questions.requests(llm, self._decoding | setting.decoding, first)
        return answer_all(llm, list(itertools.islice(itertools.cycle(requests), count)), batch)[1]

    def stop(self) -> None:
        """End the running engine."""
        self._engine.stop()

    def _started(self, setting: Setting) -> "LLM":
        arguments = self._arguments | setting.engine
        if self._engine.runs(arguments):
            return self._engine.of(arguments)
        start = time.monotonic()
        llm = self._engine.of(arguments)
        warm_up = self.questions.requests(llm, self._decoding, range(min(NUM_WARMUP, self.questions.size)))
        answer_all(llm, warm_up, NUM_WARMUP)
        self._starts.append(time.monotonic() - start)
        return llm
