"""Benchmarks and tables as the papers set them up (``paper_tasks.toml``): lengths, steps and few-shot counts, with
lm_eval's task; and which benchmarks, cache methods and ways of unmasking a table compares.

The settings are the papers', the prompts, stop strings and scoring are lm_eval's; the papers used other harnesses for
some, so that scores need not be theirs. No paper says how it gives few-shot examples to an instructed model; lm_eval's
way is a turn each. Every row here unmasks one token per step.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from dllm_engine.families import ModelFamily
from dllm_engine.text import choices

_TABLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_TASK_FILES = Path(__file__).with_name("tasks")
PAPERS: dict[str, str] = {name: table["title"] for name, table in _TABLES.items()}
"""In the order in which they are asked for a benchmark's settings where none is named."""


@dataclass(frozen=True)
class PaperTask:
    """A benchmark in one paper."""

    paper: str
    benchmark: str
    task: str
    """A task or a group of lm_eval, or a file of ``tasks/``."""
    gen_length: int
    source: str
    """Table or appendix of the paper."""
    block_length: int | None = None
    """None: the whole response is one block."""
    num_fewshot: int | None = None
    """None: the paper does not say, and lm_eval's own count holds."""
    base_task: str | None = None
    """The task for models that are not instructed, where it is another."""
    metric: str | None = None
    """The metric to report; None: lm_eval's first."""
    max_prompt_tokens: int | None = None
    family: str | None = None
    """``model_type`` of the only family the row is for; None: both."""
    base: bool | None = None
    """True for models that are not instructed, False for the others; None: for all."""
    chat_template: bool = True
    """Give instructed models their chat template."""
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of ``DiffusionParams``."""
    guided: dict[str, Any] | None = None
    """Arguments of ``DiffusionParams`` for requests with a guide, in place of the others."""
    method_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Cache options of all models, by cache method."""
    checkpoint_options: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Cache options that the benchmark has, by checkpoint and cache method."""

    @property
    def decoding(self) -> dict[str, Any]:
        """Arguments of ``DiffusionParams``."""
        length = self.gen_length
        return {"gen_length": length, "block_length": self.block_length or length, "steps": length} | self.options

    def is_for(self, family: ModelFamily, is_base: bool) -> bool:
        # DreamReasoner has Dream's type, and none of its settings.
        is_familys = self.family is None or (self.family == family.model_type and family.attention == "full")
        return is_familys and self.base in (None, is_base)

    def task_for(self, is_base: bool) -> str:
        """lm_eval's task, or its file."""
        name = self.base_task if is_base and self.base_task is not None else self.task
        return str(_TASK_FILES / name) if name.endswith(".yaml") else name

    def cache_options(self, model: str) -> dict[str, dict[str, Any]]:
        """Cache options that the benchmark has for a model, by cache method."""
        return self.method_options | self.checkpoint_options.get(PurePath(model).name, {})


PAPER_TASKS: tuple[PaperTask, ...] = tuple(
    PaperTask(
        paper,
        checkpoint_options=table.get("cache_options", {}).get(row["benchmark"], {}),
        **(table["defaults"] | row),
    )
    for paper, table in _TABLES.items()
    for row in table["tasks"]
)


@dataclass(frozen=True)
class PaperTable:
    """A table, or figure, of a paper."""

    paper: str
    name: str
    about: str
    models: str = ""
    benchmarks: str = ""
    """Empty where it cannot be made."""
    methods: str = "all"
    """As ``--methods`` takes them."""
    rules: str = "one"
    """As ``--unmasking-rules`` takes them."""
    without: str = ""
    """The parts that cannot be made, or are ours, and why."""

    @property
    def key(self) -> str:
        """As ``--paper-table`` takes it."""
        return f"{self.paper}/{self.name}"


def _table(paper: str, entry: dict[str, str]) -> PaperTable:
    groups = _TABLES[paper].get("groups", {})
    return PaperTable(paper, **entry | {"benchmarks": groups.get(entry.get("benchmarks"), entry.get("benchmarks", ""))})


PAPER_TABLES: dict[str, PaperTable] = {
    made.key: made for paper, table in _TABLES.items() for made in (_table(paper, entry) for entry in table["tables"])
}
"""By key."""


def paper_table(key: str) -> PaperTable:
    """Raises ``ValueError`` for a table that is unknown, or cannot be made."""
    if key not in PAPER_TABLES:
        raise ValueError(f"table {key!r} is unknown{choices(key, PAPER_TABLES)}")
    table = PAPER_TABLES[key]
    if not table.benchmarks:
        raise ValueError(f"{key} is not made by this command: {table.without}")
    return table


def paper_task(benchmark: str, family: ModelFamily, paper: str | None = None, *, is_base: bool = False) -> PaperTask:
    """The row of a benchmark, of the first paper that has it unless one is named; raises ``ValueError``."""
    if paper is not None and paper not in PAPERS:
        raise ValueError(f"paper {paper!r} is unknown{choices(paper, PAPERS)}")
    rows = [row for row in PAPER_TASKS if paper in (None, row.paper) and row.is_for(family, is_base)]
    for row in rows:
        if row.benchmark == benchmark:
            return row
    where = f"paper {paper} has" if paper is not None else "the papers have"
    known = ", ".join(dict.fromkeys(row.benchmark for row in rows))
    raise ValueError(f"benchmark {benchmark!r} is unknown; {where} {known}")
