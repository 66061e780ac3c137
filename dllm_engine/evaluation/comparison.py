"""Comparisons: cache methods and ways of unmasking on the same tasks, one engine after the other."""

import gc
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from tqdm import tqdm

from dllm_engine.evaluation.answering import Answer, Cost, Memory, Request, answer_all, answers
from dllm_engine.evaluation.result_file import ResultFile
from dllm_engine.evaluation.score import Result, Score
from dllm_engine.text import one_line

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

LoadEngine = Callable[[dict[str, Any]], "LLM"]
"""Starts an engine with arguments of ``LLM``."""
NUM_WARMUP = 4
"""Requests that an engine answers before it is timed."""
SAVE_SECONDS = 30
"""From one time that the answers of an unfinished row are written to the next."""
SCHEMA = 1
"""Of result files; raised where a reader of older ones would go wrong."""


@dataclass(frozen=True)
class Combination:
    """A cache method with a way of unmasking, as the command line names them."""

    method: str
    unmasking: str
    engine: dict[str, Any]
    """Arguments of ``LLM``."""
    decoding: dict[str, Any]
    """Arguments of ``DiffusionParams``."""

    @property
    def is_guided(self) -> bool:
        return self.engine.get("guide_model") is not None


@dataclass(frozen=True)
class Task(ABC):
    """What is asked, and how it is scored."""

    name: str
    decoding: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """Arguments of ``DiffusionParams``, where a combination has none of its own."""
    guided: dict[str, Any] | None = field(default=None, kw_only=True)
    """The same for combinations with a guide; None: as the others, without ``steps``."""
    cache_options: dict[str, dict[str, Any]] = field(default_factory=dict, kw_only=True)
    """By cache method, where a combination has none of its own."""

    @property
    def label(self) -> str:
        """As rows name it."""
        return Path(self.name).stem if self.name.endswith((".yaml", ".jsonl")) else self.name

    @abstractmethod
    def score(self, llm: "LLM", decoding: dict[str, Any], answer: Answer) -> Result:
        """Score an engine with arguments of ``DiffusionParams``; ``answer`` answers requests."""

    def engine_of(self, combination: Combination) -> dict[str, Any]:
        engine = combination.engine
        return engine | {"cache_options": self.cache_options.get(engine["cache_method"], {}) | engine["cache_options"]}

    def decoding_of(self, combination: Combination) -> dict[str, Any]:
        counts = combination.is_guided or combination.decoding.keys() & {"tokens_per_step", "steps_per_block"}
        own = {name: value for name, value in self.decoding.items() if not (counts and name == "steps")}
        return (self.guided if combination.is_guided and self.guided is not None else own) | combination.decoding


class OneEngine:
    """The engine that runs, of those that are asked for one after the other: a device holds one at a time."""

    def __init__(self, load: LoadEngine) -> None:
        self._load = load
        self._llm: LLM | None = None
        self._arguments: dict[str, Any] | None = None
        self.is_warm = False
        """Whether the running engine has answered; for who asks it to say."""

    def runs(self, arguments: dict[str, Any]) -> bool:
        """Whether the running engine has these arguments of ``LLM``."""
        return self._arguments == arguments

    def of(self, arguments: dict[str, Any]) -> "LLM":
        """The engine with these arguments of ``LLM``; another one is stopped first."""
        if self._llm is None or not self.runs(arguments):
            self.stop()
            self._llm, self._arguments, self.is_warm = self._load(arguments), arguments, False
        return self._llm

    def stop(self) -> None:
        """End the running engine, if there is one."""
        if self._llm is not None:
            _stop(self._llm)
        self._llm = self._arguments = None
        gc.collect()


@dataclass
class Progress:
    """How far a row is: its responses, and what they cost."""

    texts: dict[str, str] = field(default_factory=dict)
    """By the number of the request; JSON has no other keys."""
    cost: Cost = field(default_factory=Cost)
    memory: Memory | None = None


class ScoreFile(ResultFile):
    """The rows of a table, and how far one more is. Without a path nothing is written."""

    def __init__(self, path: Path | None, subject: dict[str, Any]) -> None:
        self.scores: dict[str, Score] = {}
        self.unfinished: dict[str, Progress] = {}
        self.about: dict[str, Any] = {}
        """What is written beside them: command, machine."""
        self._is_written = path is not None
        if path is not None:
            super().__init__(path, "eval", SCHEMA, subject)
            for score in TypeAdapter(list[Score]).validate_python(self.stored.get("scores", [])):
                self.scores[key_of(score.method, score.unmasking, score.task)] = score
            self.unfinished = TypeAdapter(dict[str, Progress]).validate_python(self.stored.get("unfinished", {}))

    def save(self) -> None:
        """Write all of it."""
        if self._is_written:
            scores = [asdict(score) for score in self.scores.values()]
            unfinished = {key: asdict(progress) for key, progress in self.unfinished.items() if progress.texts}
            self.write(depth=2, **self.about, scores=scores, unfinished=unfinished)


def key_of(method: str, unmasking: str, task: str) -> str:
    """The name of a row."""
    return json.dumps([method, unmasking, task])


class Comparison:
    """Fills a table: a row per combination and task.

    Args:
        combinations: cache methods with ways of unmasking.
        tasks: what each is asked.
        file: rows so far; each is written as soon as it is scored, and its answers while it is not.
        load: starts an engine.
    """

    def __init__(
        self, combinations: Sequence[Combination], tasks: Sequence[Task], file: ScoreFile, load: LoadEngine
    ) -> None:
        self.file = file
        self.errors: dict[str, str] = {}
        """Why a row could not be measured."""
        self._engine, self._rows = OneEngine(load), [(c, task) for c in combinations for task in tasks]
        self._broken: dict[str, ValueError] = {}
        """Why engines do not start."""

    @property
    def scores(self) -> list[Score]:
        """Those that were asked for first, in that order, then what else the file holds."""
        asked = [_key(*row) for row in self._rows]
        ordered = [*(key for key in asked if key in self.file.scores), *self.file.scores]
        return [self.file.scores[key] for key in dict.fromkeys(ordered)]

    def run(self) -> None:
        """Measure the rows that are missing. Interrupted, it leaves what it has measured in the file.

        Raises:
            ValueError: not one row can be measured.
        """
        missing = [row for row in self._rows if _key(*row) not in self.file.scores]
        done = len(self._rows) - len(missing)
        # An engine starts once: rows that share it follow each other.
        order = list(dict.fromkeys(_name(task.engine_of(c)) for c, task in missing))
        missing.sort(key=lambda row: order.index(_name(row[1].engine_of(row[0]))))
        form = "{percentage:3.0f}% |{bar:20}| {desc} [{elapsed}<{remaining}]"
        try:
            with tqdm(total=len(self._rows), initial=done, bar_format=form, leave=False) as bar:
                for row in missing:
                    bar.set_description_str(" ".join(json.loads(_key(*row))))
                    self._measure(*row, bar)
        finally:
            self._engine.stop()
        if not self.file.scores:
            raise ValueError(next(iter(self.errors.values())))

    def _measure(self, combination: Combination, task: Task, bar: Any) -> None:
        key, before = _key(combination, task), bar.n
        progress = self.file.unfinished.setdefault(key, Progress())
        engine, decoding = task.engine_of(combination), task.decoding_of(combination)
        try:
            result = task.score(self._started(engine), decoding, self._answering(progress, bar))
            self.file.scores[key] = Score(
                method=combination.method,
                unmasking=combination.unmasking,
                task=task.label,
                result=result,
                cost=progress.cost,
                memory=progress.memory,
                engine={name: value for name, value in engine.items() if value is not None},
                decoding=decoding,
            )
            del self.file.unfinished[key]
        except (ValueError, RuntimeError) as error:
            # A method and a rule may exclude each other, or memory may not suffice; the other rows go on.
            self.errors[key] = one_line(error)
            if isinstance(error, RuntimeError):
                self._engine.stop()  # it may be in any state
        finally:
            self.file.save()
        bar.update(before + 1 - bar.n)

    def _started(self, engine: dict[str, Any]) -> "LLM":
        name = _name(engine)
        if name in self._broken:
            raise self._broken[name]
        try:
            return self._engine.of(engine)
        except ValueError as error:
            self._broken[name] = error
            raise

    def _answering(self, progress: Progress, bar: Any) -> Answer:
        """What answers the requests of a row, but those that were answered before it was interrupted."""
        given = 0

        def answer(llm: "LLM", requests: Sequence[Request]) -> list[str]:
            nonlocal given
            numbers = [str(given + index) for index in range(len(requests))]
            given += len(requests)
            open_ones = [index for index, number in enumerate(numbers) if number not in progress.texts]
            self._ask(llm, [requests[index] for index in open_ones], [numbers[i] for i in open_ones], progress, bar)
            return [progress.texts[number] for number in numbers]

        return answer

    def _ask(self, llm: "LLM", requests: Sequence[Request], numbers: list[str], progress: Progress, bar: Any) -> None:
        from dllm_engine.bench.memory import MemoryMeter, touch_pages
        from dllm_engine.bench.passes import is_in_process

        if not requests:
            return
        measures = is_in_process(llm)
        if not self._engine.is_warm:
            if measures:
                touch_pages(llm)
            answer_all(llm, requests[:NUM_WARMUP], NUM_WARMUP)
            self._engine.is_warm = True
        meter = MemoryMeter(llm) if measures else None
        at_once = llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
        saved = time.monotonic()
        try:
            for index, output, cost in answers(llm, requests, at_once, meter):
                progress.texts[numbers[index]] = output.outputs[0].text
                progress.cost.add(cost)
                bar.update(1 / len(requests))
                if time.monotonic() - saved > SAVE_SECONDS:
                    self.file.save()
                    saved = time.monotonic()
        finally:
            if meter is not None:
                memory = meter.read()
                progress.memory = memory if progress.memory is None else memory.max(progress.memory)


def _name(engine: dict[str, Any]) -> str:
    return json.dumps(engine, default=str)


def _key(combination: Combination, task: Task) -> str:
    return key_of(combination.method, combination.unmasking, task.label)


def _stop(llm: "LLM") -> None:
    """A device holds one engine at a time, and an engine that ends takes vLLM's process groups along."""
    llm.llm_engine.engine_core.shutdown()
