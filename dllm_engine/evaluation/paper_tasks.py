"""Benchmarks and tables with the settings of papers (``paper_tasks.toml``).

Prompts, stop strings and scoring are those of lm_eval. Papers used other harnesses for
some benchmarks, so scores may differ. No paper says how it gives few-shot examples to
an instructed model; lm_eval makes each example a turn. Every row here unmasks one token
per step.
"""

import logging
import tomllib
from pathlib import Path
from typing import Any

from dllm_engine.checkpoints import load_config
from dllm_engine.evaluation.harness import HarnessTask
from dllm_engine.families import ModelFamily
from dllm_engine.model_name import has_word, own_name
from dllm_engine.text import choices

logger = logging.getLogger(f"vllm.{__name__}")

_PAPERS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
_TASK_FILES = Path(__file__).with_name("tasks")
PAPERS: dict[str, str] = {name: paper["title"] for name, paper in _PAPERS.items()}
"""Papers by name, in the order in which they are searched for a benchmark."""
PAPER_TASKS: tuple[dict[str, Any], ...] = tuple(
    {
        "paper": name,
        "cache_options": paper.get("cache_options", {}).get(row["benchmark"], {}),
    }
    | paper["defaults"]
    | row
    for name, paper in _PAPERS.items()
    for row in paper["tasks"]
)
"""Rows with the settings of one benchmark in one paper. Keys are those of the file;
``cache_options`` are by checkpoint and cache method.
"""
PAPER_TABLES: dict[str, dict[str, str]] = {
    f"{name}/{table['name']}": {
        "paper": name,
        "benchmarks": "",
        "methods": "all",
        "rules": "one",
    }
    | table
    for name, paper in _PAPERS.items()
    for table in paper["tables"]
}
"""Tables by their names in ``--paper-table``, with the keys of the file. A table that
cannot be made has no ``benchmarks``.
"""


def paper_table(key: str) -> dict[str, str]:
    """A table of a paper, with groups replaced by their benchmarks. Raises
    ``ValueError`` if it is unknown, or cannot be made.
    """
    if key not in PAPER_TABLES:
        raise ValueError(f"table {key!r} is unknown{choices(key, PAPER_TABLES)}")
    table = PAPER_TABLES[key]
    if not table["benchmarks"]:
        raise ValueError(f"{key} is not made by this command: {table['without']}")
    groups = _PAPERS[table["paper"]].get("groups", {})
    return table | {"benchmarks": groups.get(table["benchmarks"], table["benchmarks"])}


def paper_task(
    benchmark: str,
    family: ModelFamily,
    paper: str | None = None,
    *,
    is_base: bool = False,
) -> dict[str, Any]:
    """The row of a benchmark, in the named paper or in the first paper that has it.
    Raises ``ValueError`` if there is none.
    """
    if paper is not None and paper not in PAPERS:
        raise ValueError(f"paper {paper!r} is unknown{choices(paper, PAPERS)}")
    rows = [
        row
        for row in PAPER_TASKS
        if paper in (None, row["paper"]) and is_for(row, family, is_base)
    ]
    for row in rows:
        if row["benchmark"] == benchmark:
            return row
    where = f"paper {paper} has" if paper is not None else "the papers have"
    known = ", ".join(dict.fromkeys(row["benchmark"] for row in rows))
    raise ValueError(f"benchmark {benchmark!r} is unknown; {where} {known}")


def is_for(row: dict[str, Any], family: ModelFamily, is_base: bool) -> bool:
    """Return True if a row is for models of a family, instructed or not."""
    is_familys = family.name in row.get("families", [family.name])
    return is_familys and row.get("base", is_base) == is_base


def harness_task(
    row: dict[str, Any], model: str, *, is_base: bool, add_bos_token: bool | None = None
) -> HarnessTask:
    """Make the task of a row for a checkpoint."""
    length = row["gen_length"]
    name = row.get("base_task", row["task"]) if is_base else row["task"]
    lengths = {
        "gen_length": length,
        "block_length": row.get("block_length", length),
        "steps": length,
    }
    return HarnessTask(
        str(_TASK_FILES / name) if name.endswith(".yaml") else name,
        num_fewshot=row.get("num_fewshot"),
        metric=row.get("metric"),
        max_prompt_tokens=row.get("max_prompt_tokens"),
        with_chat_template=row.get("chat_template", True) and not is_base,
        add_bos_token=add_bos_token,
        decoding=lengths | row.get("options", {}),
        guided=row.get("guided"),
        cache_options=row.get("method_options", {})
        | row["cache_options"].get(own_name(model), {}),
    )


def tasks_of_papers(
    model: str, benchmarks: list[str], paper: str | None
) -> list[HarnessTask]:
    """Tasks for benchmarks with a paper's settings for a model. Raises ``ValueError``
    for an unknown benchmark or paper.
    """
    family, name = load_config(model).family, own_name(model)
    is_base = has_word(name, "base")
    logger.info(
        "%s: evaluated as %s, by its name",
        name,
        "a base model" if is_base else "an instructed model",
    )
    rows = [
        paper_task(benchmark, family, paper, is_base=is_base)
        for benchmark in benchmarks
    ]
    add_bos_token = True if is_base and family.base_prompts_have_bos else None
    return [
        harness_task(row, model, is_base=is_base, add_bos_token=add_bos_token)
        for row in rows
    ]
