"""Benchmarks as the papers set them up (``paper_tasks.toml``): lengths, steps and few-shot counts, with lm_eval's task.

The settings are the papers', the prompts, stop strings and scoring are lm_eval's; the papers used other harnesses for
some, so that scores need not be theirs. No paper says how it gives few-shot examples to an instructed model; lm_eval's
way is a turn each. Every row here unmasks one token per step.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from dllm_engine.families import ModelFamily

_TABLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PAPERS: dict[str, str] = {name: table["title"] for name, table in _TABLES.items()}
"""In the order in which they are asked for a benchmark's settings where none is named."""


@dataclass(frozen=True)
class PaperTask:
    """A benchmark in one paper."""

    paper: str
    benchmark: str
    task: str
    """Of lm_eval: a task or a group of them."""
    gen_length: int
    source: str
    """Where in the paper."""
    block_length: int | None = None
    """None: the whole response is one block."""
    num_fewshot: int | None = None
    """None: the paper does not say, and lm_eval's own count holds."""
    base_task: str | None = None
    """The task for models that are not instructed, where it is another."""
    metric: str | None = None
    """Of several the one to report; None: lm_eval's first."""
    max_prompt_tokens: int | None = None
    family: str | None = None
    """``model_type`` of the only family the row is for; None: both."""
    checkpoint_options: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Cache options that the benchmark has, by checkpoint and cache method."""

    @property
    def decoding(self) -> dict[str, int]:
        """Arguments of ``DiffusionParams``."""
        length = self.gen_length
        return {"gen_length": length, "block_length": self.block_length or length, "steps": length}

    def is_for(self, family: ModelFamily) -> bool:
        return self.family in (None, family.model_type)

    def cache_options(self, model: str) -> dict[str, dict[str, Any]]:
        """Cache options that the benchmark has for a model, by cache method."""
        return self.checkpoint_options.get(PurePath(model).name, {})


PAPER_TASKS: tuple[PaperTask, ...] = tuple(
    PaperTask(
        paper,
        checkpoint_options=table.get("cache_options", {}).get(row["benchmark"], {}),
        **(table["defaults"] | row),
    )
    for paper, table in _TABLES.items()
    for row in table["tasks"]
)


def paper_task(benchmark: str, family: ModelFamily, paper: str | None = None) -> PaperTask:
    """The row of a benchmark, of the first paper that has it unless one is named; raises ``ValueError``."""
    if paper is not None and paper not in PAPERS:
        raise ValueError(f"paper {paper!r} is unknown; choose one of {', '.join(PAPERS)}")
    rows = [row for row in PAPER_TASKS if paper in (None, row.paper) and row.is_for(family)]
    for row in rows:
        if row.benchmark == benchmark:
            return row
    where = f"paper {paper} has" if paper is not None else "the papers have"
    known = ", ".join(dict.fromkeys(row.benchmark for row in rows))
    raise ValueError(f"benchmark {benchmark!r} is unknown; {where} {known}")
