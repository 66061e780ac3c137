"""Comparisons: cache methods and ways of unmasking on the same tasks, a row of a table each."""

import csv
import hashlib
import json
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from tqdm import tqdm

from dllm_engine.evaluation.result_file import ResultFile
from dllm_engine.evaluation.runner import Answer, Answers, LoadEngine, Runner
from dllm_engine.text import format_table, one_line

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

SAVE_SECONDS = 30
"""From one time that the answers of an unfinished row are written to the next."""
SCHEMA = 2
"""Number of the layout of result files; raised where a reader of older ones would go wrong."""
UNKNOWN = "–"
COST_COLUMNS = {
    "PASSES/ANSWER": ("passes_per_answer", ".1f"),
    "TOKENS/PASS": ("tokens_per_pass", ".2f"),
    "ROWS/TOKEN": ("rows_per_token", ".1f"),
    "TOKENS/S": ("tokens_per_second", ".1f"),
    "MEMORY": ("memory_mib", ".1f"),
    "PAGES": ("pages_mib", ".2f"),
}
"""Columns, the value of each and its format."""
COLUMNS = {
    "METHOD": ("method", ""),
    "UNMASKING": ("unmasking", ""),
    "TASK": ("task", ""),
    "METRIC": ("metric", ""),
    "SCORE": ("score", ".4f"),
    "±": ("stderr", ".4f"),
    "EXAMPLES": ("examples", ""),
    **COST_COLUMNS,
}


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
class Result:
    """The score of a task."""

    metric: str
    score: float
    stderr: float | None
    """Standard error of the score; None where it is unknown."""
    examples: int
    details: dict[str, Any] = field(default_factory=dict)
    """Scores of the parts of the task."""


@dataclass(frozen=True)
class Task(ABC):
    """Examples, and how responses to them are scored."""

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

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of examples."""

    @abstractmethod
    def score(self, llm: "LLM", answer: Answer, decoding: dict[str, Any]) -> Result:
        """Score an engine with arguments of ``DiffusionParams``; ``answer`` answers requests."""

    @abstractmethod
    def scores(self, llm: "LLM", answer: Answer, decoding: dict[str, Any], examples: Sequence[int]) -> list[float]:
        """Scores of some examples, from 0 to 1."""

    @property
    def subject(self) -> dict[str, Any]:
        """Name and digest of the examples and settings, for a result file."""
        return {"tasks": self.name, "tasks_digest": hashlib.sha256(repr(self).encode()).hexdigest()[:16]}

    def engine_of(self, combination: Combination) -> dict[str, Any]:
        """Arguments of ``LLM``."""
        engine = combination.engine
        return engine | {"cache_options": self.cache_options.get(engine["cache_method"], {}) | engine["cache_options"]}

    def decoding_of(self, combination: Combination) -> dict[str, Any]:
        """Arguments of ``DiffusionParams``."""
        counts = combination.is_guided or combination.decoding.keys() & {"tokens_per_step", "steps_per_block"}
        own = {name: value for name, value in self.decoding.items() if not (counts and name == "steps")}
        return (self.guided if combination.is_guided and self.guided is not None else own) | combination.decoding


@dataclass
class Row:
    """A combination on a task."""

    method: str
    unmasking: str
    task: str
    engine: dict[str, Any]
    """Arguments of ``LLM``."""
    decoding: dict[str, Any]
    """Arguments of ``DiffusionParams``."""
    answers: Answers = field(default_factory=Answers)
    """Texts only until all requests are answered."""
    result: Result | None = None
    """None until then."""

    @property
    def key(self) -> str:
        return json.dumps([self.method, self.unmasking, self.task])

    @property
    def values(self) -> dict[str, Any]:
        """Names, score and cost."""
        names = {"method": self.method, "unmasking": self.unmasking, "task": self.task}
        result = {} if self.result is None else vars(self.result)
        return names | {name: value for name, value in result.items() if name != "details"} | self.answers.cost.figures


class Comparison:
    """Fills a table: a row per combination and task.

    Args:
        combinations: cache methods with ways of unmasking.
        tasks: what each is asked.
        file: rows so far; each is written as soon as it is scored, and its answers while it is not.
        load: starts an engine.
    """

    def __init__(
        self, combinations: Sequence[Combination], tasks: Sequence[Task], file: ResultFile, load: LoadEngine
    ) -> None:
        self.file, self._runner = file, Runner(load)
        stored = {row.key: row for row in TypeAdapter(list[Row]).validate_python(file.stored.get("rows", []))}
        self.rows: dict[str, Row] = {}
        """Rows that were asked for first, then the others of the file."""
        self._tasks: dict[str, Task] = {}
        for combination in combinations:
            for task in tasks:
                engine = {name: value for name, value in task.engine_of(combination).items() if value is not None}
                row = Row(combination.method, combination.unmasking, task.label, engine, task.decoding_of(combination))
                self.rows[row.key], self._tasks[row.key] = stored.get(row.key, row), task
        self.rows = self.rows | stored
        self.errors: dict[str, str] = {}
        """Why a row could not be measured."""

    @property
    def scored(self) -> list[Row]:
        return [row for row in self.rows.values() if row.result is not None]

    def save(self, **about: Any) -> None:
        """Write all of it, after ``about``."""
        self.file.write(**about, rows=[asdict(row) for row in self.rows.values() if row.result or row.answers.texts])

    def run(self) -> None:
        """Measure the rows that are missing. Interrupted, it leaves what it has measured in the file.

        Raises:
            ValueError: not one row can be measured.
        """
        missing = [row for key, row in self.rows.items() if row.result is None and key in self._tasks]
        # An engine starts once: rows that share it follow each other.
        order = list(dict.fromkeys(_name(row.engine) for row in missing))
        missing.sort(key=lambda row: order.index(_name(row.engine)))
        form = "{percentage:3.0f}% |{bar:20}| {desc} [{elapsed}<{remaining}]"
        done = len(self._tasks) - len(missing)
        try:
            with tqdm(total=len(self._tasks), initial=done, bar_format=form, leave=False) as bar:
                for row in missing:
                    bar.set_description_str(f"{row.method} {row.unmasking} {row.task}")
                    self._measure(row, bar)
        finally:
            self._runner.stop()
        if not self.scored:
            raise ValueError(next(iter(self.errors.values())))

    def _measure(self, row: Row, bar: Any) -> None:
        before, saved = bar.n, time.monotonic()

        def tell(share: float) -> None:
            nonlocal saved
            bar.update(share)
            if time.monotonic() - saved > SAVE_SECONDS:
                self.save()
                saved = time.monotonic()

        try:
            ask = partial(self._tasks[row.key].score, decoding=row.decoding)
            row.result = self._runner.run(row.engine, ask, row.answers, tell=tell)
            row.answers.texts = {}
        except (ValueError, RuntimeError) as error:
            # A method and a rule may exclude each other, or memory may not suffice; the other rows go on.
            self.errors[row.key] = one_line(error)
        finally:
            self.save()
        bar.update(before + 1 - bar.n)


def _name(engine: dict[str, Any]) -> str:
    return json.dumps(engine, default=str)


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> str:
    """Rows of values as text, under a header."""
    cells = [
        [UNKNOWN if row[name] is None else format(row[name], form) for name, form in columns.values()] for row in rows
    ]
    return format_table([tuple(columns), *cells])


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A line per row, with all digits."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def mean_and_error(scores: Sequence[float]) -> tuple[float, float]:
    """Mean of the scores and its standard error."""
    return statistics.fmean(scores), statistics.pstdev(scores) / math.sqrt(len(scores))
