"""Comparisons of cache methods and unmasking rules on the same tasks, one table row
each.
"""

import gc
import itertools
import json
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from dllm_engine.evaluation.runner import Cost, MeasuredEngine
from dllm_engine.output_lock import OutputLock, replace_output
from dllm_engine.text import format_table, one_line

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

Load = Callable[[dict[str, Any]], "LLM"]
"""Function that starts an engine with arguments of ``LLM``."""
SCHEMA = 4
"""Version of the layout of result files. It is raised if an older reader would misread
a file.
"""
COST_COLUMNS = {
    "PASSES/ANSWER": ("passes_per_answer", ".1f"),
    "TOKENS/PASS": ("tokens_per_pass", ".2f"),
    "ROWS/TOKEN": ("rows_per_token", ".1f"),
    "TOKENS/S": ("tokens_per_second", ".1f"),
    "MEMORY": ("memory_mib", ".1f"),
    "PAGES": ("pages_mib", ".2f"),
}
"""Columns, with the name and format of their values."""
COLUMNS = {
    **{name.upper(): (name, "") for name in ("method", "unmasking", "task", "metric")},
    "SCORE": ("score", ".4f"),
    "±": ("stderr", ".4f"),
    "EXAMPLES": ("examples", ""),
    **COST_COLUMNS,
}


@dataclass
class Combination:
    """A cache method with an unmasking rule, by name, and as arguments of ``LLM`` and
    of ``DiffusionParams``.
    """

    method: str
    unmasking: str
    engine: dict[str, Any]
    decoding: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """The score of a task, and the scores of its parts."""

    metric: str
    score: float
    stderr: float | None
    """Standard error of the score; None if unknown."""
    examples: int
    details: dict[str, Any] = field(default_factory=dict)


UNMEASURED = Result("", math.nan, None, 0)


@dataclass(frozen=True)
class Task(ABC):
    """Base class of a task: examples, default decoding options, and scoring of
    responses.
    """

    name: str
    decoding: dict[str, Any] = field(default_factory=dict, kw_only=True)
    guided: dict[str, Any] | None = field(default=None, kw_only=True)
    """Decoding options with a guide; None: the same options without ``steps``."""
    cache_options: dict[str, dict[str, Any]] = field(default_factory=dict, kw_only=True)
    """Cache options by method."""

    @property
    def digest(self) -> str:
        """Digest of examples that may change under the same name."""
        return ""

    def shared_part(self, page_size: int) -> float:
        """Share of the prompts in common beginnings that may fill a page of
        ``page_size`` tokens; 0 if unknown.
        """
        return 0.0

    @abstractmethod
    def score(self, engine: MeasuredEngine, decoding: dict[str, Any]) -> Result:
        """Score the answers of an engine."""

    def engine_of(self, combination: Combination) -> dict[str, Any]:
        engine = combination.engine
        return engine | {
            "cache_options": self.cache_options.get(engine["cache_method"], {})
            | engine["cache_options"]
        }

    def decoding_of(self, combination: Combination) -> dict[str, Any]:
        is_guided = combination.engine.get("guide_model") is not None
        if is_guided and self.guided is not None:
            return self.guided | combination.decoding
        decoding = dict(self.decoding)
        if is_guided or combination.decoding.keys() & {
            "tokens_per_step",
            "steps_per_block",
        }:
            decoding.pop("steps", None)
        return decoding | combination.decoding


@dataclass
class Row(Combination):
    """A combination on a task."""

    task: str
    result: Result = UNMEASURED
    cost: Cost = field(default_factory=Cost)
    digest: str = ""
    """``Task.digest``"""

    @property
    def key(self) -> str:
        return f"{self.method} {self.unmasking} {self.task}"

    @property
    def is_measured(self) -> bool:
        return self.result is not UNMEASURED

    @property
    def values(self) -> dict[str, Any]:
        """Names, score, details of the score and cost, by the names of columns."""
        return self.result.details | vars(self) | vars(self.result) | self.cost.figures


def check_folder_of(path: Path | None) -> None:
    """Raise ``ValueError`` for a file that cannot be written, because its folder does
    not exist.
    """
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")


def check_output(path: Path) -> None:
    """Raise ``ValueError`` for a file that cannot be written, or whose name does not
    end with .json.
    """
    if path.suffix != ".json":
        raise ValueError(
            f"--output {path}: the results are JSON; give the file the ending .json"
        )
    check_folder_of(path)


def stored_rows(path: Path | None, subject: dict[str, Any]) -> list[Row]:
    """The rows of a file, if it exists. Raises ``ValueError`` if it has another
    subject.
    """
    if path is None or not path.exists():
        return []
    try:
        stored = dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} holds no JSON object: {error}; choose another --output"
        ) from None
    before = stored.get("subject", {})
    for name, value in subject.items():
        if before.get(name) != value:
            raise ValueError(
                f"{path} has results with {name}={before.get(name)!r}, this run has "
                f"{value!r}; choose another --output, or remove the file"
            )
    return TypeAdapter(list[Row]).validate_python(stored.get("rows", []))


class Comparison(AbstractContextManager["Comparison"]):
    """Table of a command of ``dllm``, with a row per combination and task. A row is
    written to the file ``path`` as soon as it is measured, so that the same command can
    resume. Within the context, no other run can write the file. ``subject``: settings
    that all rows depend on. One engine runs at a time, because a device holds only one.
    """

    def __init__(
        self, path: Path | None, command: str, subject: dict[str, Any], load: Load
    ) -> None:
        self._path, self._load = path, load
        self._subject = json.loads(
            json.dumps({"schema": SCHEMA, "of": command, **subject}, default=str)
        )
        self._llm: LLM | None = None
        self._arguments: dict[str, Any] | None = None
        with ExitStack() as lock:
            if path is not None:
                check_output(path)
                lock.enter_context(OutputLock(path))
            self._rows = {row.key: row for row in stored_rows(path, self._subject)}
            self._lock = lock.pop_all()
        self._tasks: dict[str, Task] = {}
        """Tasks of the rows that were asked for."""
        self.errors: dict[str, str] = {}
        """Why a row could not be measured."""

    def __exit__(self, *error: object) -> None:
        """Let other runs write the file."""
        self._lock.close()

    def add(
        self, combinations: Sequence[Combination], tasks: Sequence[Task]
    ) -> list[Row]:
        """Add rows. Rows that the file has already keep their results."""
        rows = []
        for combination, task in itertools.product(combinations, tasks):
            label = (
                Path(task.name).stem
                if task.name.endswith((".yaml", ".jsonl"))
                else task.name
            )
            engine = task.engine_of(combination)
            decoding = task.decoding_of(combination)
            row = Row(
                combination.method,
                combination.unmasking,
                engine,
                decoding,
                label,
                digest=task.digest,
            )
            if self._tasks.setdefault(row.key, task) is not task:
                raise ValueError(
                    f"two tasks have the name {label!r}; give their files different "
                    f"names"
                )
            rows.append(self._rows.setdefault(row.key, row))
            if rows[-1].digest != row.digest:
                raise ValueError(
                    f"{self._path} has results of another {task.name}; choose another "
                    f"--output"
                )
        return rows

    @property
    def missing(self) -> list[Row]:
        """Added rows that are not measured and have not failed."""
        rows = (self._rows[key] for key in self._tasks if key not in self.errors)
        return [row for row in rows if not row.is_measured]

    @property
    def scored(self) -> list[Row]:
        """Measured rows: first the added ones, then other rows of the file."""
        rows = (self._rows[key] for key in (self._tasks | self._rows))
        return [row for row in rows if row.is_measured]

    def save(self, **about: Any) -> None:
        """Replace the file by ``about`` and all rows."""
        if self._path is None:
            return
        values = {
            "subject": self._subject,
            **about,
            "rows": [asdict(row) for row in self.scored],
        }
        replace_output(self._path, json.dumps(values, indent=1) + "\n")

    def run(self, deadline: float = math.inf) -> None:
        """Measure missing rows until ``time.monotonic()`` reaches ``deadline``. Raises
        ``ValueError`` if no row can be measured.
        """
        missing = self.missing
        engines = [row.engine for row in missing]
        # Rows that share an engine run one after the other.
        for row in sorted(missing, key=lambda row: engines.index(row.engine)):
            if time.monotonic() > deadline:
                break
            if row.key in self.errors:
                continue
            try:
                self._measure(row)
            except (ValueError, RuntimeError) as error:
                # A method and a rule may exclude each other, or memory may not suffice.
                # Other rows go on.
                same_engine = [
                    other for other in self.missing if other.engine == row.engine
                ]
                # An engine that did not start is not tried again.
                failed = [row] if self._llm is not None else same_engine
                self.errors |= dict.fromkeys(
                    (other.key for other in failed), one_line(error)
                )
                if isinstance(error, RuntimeError):
                    self.stop()  # the state of a failed engine is unknown
        if not self.scored:
            raise ValueError(next(iter(self.errors.values())))

    def stop(self) -> None:
        """End the running engine, if there is one."""
        import torch

        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()
        # vLLM measures free device memory. Without a GPU this does nothing.
        torch.cuda.empty_cache()

    def _measure(self, row: Row) -> None:
        task = self._tasks[row.key]
        if self._llm is None or self._arguments != row.engine:
            self.stop()
            self._llm = self._load(row.engine)
            self._arguments = row.engine
        engine = MeasuredEngine(self._llm, row.key)
        row.result = task.score(engine, row.decoding)
        row.cost = engine.cost
        self.save()


def table(
    rows: Iterable[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]
) -> str:
    """Rows of values as a text table with a header."""
    cells = [
        [
            "–" if row[name] is None else format(row[name], form)
            for name, form in columns.values()
        ]
        for row in rows
    ]
    return format_table([tuple(columns), *cells])


def mean_and_error(scores: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(scores), statistics.pstdev(scores) / math.sqrt(len(scores))
