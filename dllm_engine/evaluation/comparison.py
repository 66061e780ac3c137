"""Comparisons: cache methods and ways of unmasking on the same tasks, a row of a table each."""

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from dllm_engine.evaluation.result_file import ResultFile
from dllm_engine.evaluation.runner import Answer, Cost, LoadEngine, Runner
from dllm_engine.text import format_table

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

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
    **{name.upper(): (name, "") for name in ("method", "unmasking", "task", "metric")},
    "SCORE": ("score", ".4f"),
    "±": ("stderr", ".4f"),
    "EXAMPLES": ("examples", ""),
    **COST_COLUMNS,
}


@dataclass
class Combination:
    """A cache method with a way of unmasking, as the command line names them. ``engine`` and ``decoding`` are arguments
    of ``LLM`` and of ``DiffusionParams``, here and below."""

    method: str
    unmasking: str
    engine: dict[str, Any]
    decoding: dict[str, Any]

    @property
    def is_guided(self) -> bool:
        return self.engine.get("guide_model") is not None


@dataclass(frozen=True)
class Result:
    """The score of a task, and the scores of its parts."""

    metric: str
    score: float
    stderr: float | None
    """Standard error of the score; None where it is unknown."""
    examples: int
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task(ABC):
    """Examples, how they are asked where a combination does not say otherwise, and how responses are scored."""

    name: str
    decoding: dict[str, Any] = field(default_factory=dict, kw_only=True)
    guided: dict[str, Any] | None = field(default=None, kw_only=True)
    """Decoding with a guide; None: as without, but for ``steps``."""
    cache_options: dict[str, dict[str, Any]] = field(default_factory=dict, kw_only=True)
    """By cache method."""
    at_once: int | None = field(default=None, kw_only=True)
    """Requests at once; None: the engine's ``max_num_seqs``."""

    @abstractmethod
    def score(self, llm: "LLM", answer: Answer, decoding: dict[str, Any]) -> Result:
        """Score an engine; ``answer`` answers requests."""

    def engine_of(self, combination: Combination) -> dict[str, Any]:
        engine = combination.engine
        return engine | {"cache_options": self.cache_options.get(engine["cache_method"], {}) | engine["cache_options"]}

    def decoding_of(self, combination: Combination) -> dict[str, Any]:
        if combination.is_guided and self.guided is not None:
            return self.guided | combination.decoding
        own = dict(self.decoding)
        if combination.is_guided or combination.decoding.keys() & {"tokens_per_step", "steps_per_block"}:
            own.pop("steps", None)
        return own | combination.decoding


@dataclass
class Row(Combination):
    """A combination on a task. ``result`` is None until it is measured."""

    task: str
    result: Result | None = None
    cost: Cost = field(default_factory=Cost)

    @property
    def key(self) -> str:
        return f"{self.method} {self.unmasking} {self.task}"

    @property
    def values(self) -> dict[str, Any]:
        """Names, score and cost, as columns name them."""
        names = {"method": self.method, "unmasking": self.unmasking, "task": self.task}
        result = {} if self.result is None else vars(self.result) | self.result.details
        return names | result | self.cost.figures


class Comparison:
    """Fills a table: a row per combination and task.

    Args:
        file: rows so far; each is written as soon as it is measured.
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
                engine = task.engine_of(combination)
                label = Path(task.name).stem if task.name.endswith((".yaml", ".jsonl")) else task.name
                row = Row(combination.method, combination.unmasking, engine, task.decoding_of(combination), label)
                self.rows[row.key], self._tasks[row.key] = stored.get(row.key, row), task
        self.rows |= stored
        self.errors: dict[str, str] = {}
        """Why a row could not be measured."""

    @property
    def scored(self) -> list[Row]:
        return [row for row in self.rows.values() if row.result is not None]

    def save(self, **about: Any) -> None:
        """Write all of it, after ``about``."""
        self.file.write(**about, rows=[asdict(row) for row in self.scored])

    def run(self) -> None:
        """Measure the rows that are missing. Interrupted, it leaves those it has measured in the file.

        Raises:
            ValueError: not one row can be measured.
        """
        missing = {key: self.rows[key].engine for key in self._tasks if self.rows[key].result is None}
        self._runner.each(missing, self._measure, self.errors)
        if not self.scored:
            raise ValueError(next(iter(self.errors.values())))

    def _measure(self, key: str) -> None:
        row = self.rows[key]
        task = self._tasks[key]
        ask = partial(task.score, decoding=row.decoding)
        row.result, row.cost = self._runner.run(row.engine, ask, task.at_once, key)
        self.save()


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> str:
    """Rows of values as text, under a header."""
    cells = [
        [UNKNOWN if row[name] is None else format(row[name], form) for name, form in columns.values()] for row in rows
    ]
    return format_table([tuple(columns), *cells])


def mean_and_error(scores: Sequence[float]) -> tuple[float, float]:
    """Mean of the scores and its standard error."""
    return statistics.fmean(scores), statistics.pstdev(scores) / math.sqrt(len(scores))
