"""Scores: how well a cache method and a way of unmasking do on a task, and what that costs."""

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dllm_engine.evaluation.answering import MIB, Cost, Memory

UNKNOWN = "–"


@dataclass(frozen=True)
class Result:
    """How well a task was done."""

    metric: str
    score: float
    stderr: float | None
    """Standard error of the score; None where it is unknown."""
    examples: int
    details: dict[str, Any] = field(default_factory=dict)
    """What more is known, by part of the task."""


@dataclass(frozen=True)
class Score:
    """A row of the table."""

    method: str
    unmasking: str
    task: str
    result: Result
    cost: Cost
    """Of no requests where the task asked for no response."""
    memory: Memory | None
    """None where no response was asked for, or the engine runs in processes of its own."""
    engine: dict[str, Any]
    """Arguments of ``LLM``."""
    decoding: dict[str, Any]
    """Arguments of ``DiffusionParams``."""

    @property
    def figures(self) -> dict[str, float | None]:
        """What is known beside the score; memory in MiB."""
        cost, asked, memory = self.cost, self.cost.requests, self.memory
        return {
            "passes_per_answer": cost.forward_passes / asked if asked else None,
            "tokens_per_pass": cost.tokens_unmasked / cost.forward_passes if asked else None,
            "rows_per_token": cost.tokens_computed / cost.tokens_unmasked if asked else None,
            "tokens_per_second": cost.tokens_per_second if asked else None,
            "memory_mib": None if memory is None else memory.peak_bytes / MIB,
            "pages_mib": None if memory is None else memory.page_bytes / MIB,
        }


COLUMNS = {
    "METHOD": "",
    "UNMASKING": "",
    "TASK": "",
    "METRIC": "",
    "SCORE": ".4f",
    "±": ".4f",
    "EXAMPLES": "",
    "PASSES/ANSWER": ".1f",
    "TOKENS/PASS": ".2f",
    "ROWS/TOKEN": ".1f",
    "TOKENS/S": ".1f",
    "MEMORY": ".1f",
    "PAGES": ".2f",
}
"""Columns and how they are written."""


def _values(score: Score) -> dict[str, Any]:
    result = score.result
    names = {"method": score.method, "unmasking": score.unmasking, "task": score.task, "metric": result.metric}
    return names | {"score": result.score, "stderr": result.stderr, "examples": result.examples} | score.figures


def rows(scores: Iterable[Score]) -> list[Sequence[str]]:
    """The table, with its header."""
    made: list[Sequence[str]] = [tuple(COLUMNS)]
    for score in scores:
        columns = zip(_values(score).values(), COLUMNS.values(), strict=True)
        made.append([UNKNOWN if value is None else format(value, form) for value, form in columns])
    return made


def write_csv(scores: Sequence[Score], path: Path) -> None:
    """A line per score, with all digits."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, _values(scores[0]))
        writer.writeheader()
        writer.writerows(map(_values, scores))


def mean_and_error(scores: Sequence[float]) -> tuple[float, float]:
    """Mean of the scores and its standard error."""
    return statistics.fmean(scores), statistics.pstdev(scores) / math.sqrt(len(scores))
