"""``dllm eval``: how many of the demo tasks a model solves, and what that costs.

Not ``eval.py``: the module would hide Python's function from its importers.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dllm_engine.cli.comparison import ONE, RULES, ComparedScore, combinations, compare, comparison_table
from dllm_engine.cli.engine import (
    DEMO_LENGTHS,
    add_decoding_arguments,
    add_engine_arguments,
    positive_int,
    start_engine,
)
from dllm_engine.cli.errors import CommandError
from dllm_engine.cli.table import format_table
from dllm_engine.cli.task_score import COLUMNS, score_task
from dllm_engine.demo.tasks import TASKS, Example, make_examples


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "eval",
        help="score a model on the demo tasks",
        description=f"Score a model on the tasks {', '.join(TASKS)}. Responses have 32 tokens in blocks of 8 unless "
        "asked otherwise; the same seed (default: 0) gives the same examples.",
    )
    parser.add_argument("--tasks", default=",".join(TASKS), metavar="NAME,…", help="default: %(default)s")
    parser.add_argument("--count", type=positive_int, default=50, metavar="N", help="examples per task (default: 50)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the scores and settings to FILE")
    compared = parser.add_argument_group(
        "comparison", "A row per combination, over all tasks, instead of one per task."
    )
    compared.add_argument("--methods", metavar="NAME,…", help="cache methods, with their papers' settings; or `all`")
    compared.add_argument(
        "--unmasking-rules",
        metavar="RULE,…",
        help=f"`{ONE}` for one token per step, or NAME=VALUE with one of {', '.join(RULES)}",
    )
    add_decoding_arguments(parser)
    add_engine_arguments(parser)
    # The answers of these tasks fit; the seed also draws the examples.
    parser.set_defaults(run=run, seed=0, **DEMO_LENGTHS)


def run(args: argparse.Namespace) -> int:
    tasks = args.tasks.split(",")
    examples = {task: make_examples(task, args.count, args.seed) for task in tasks}
    if args.methods is not None or args.unmasking_rules is not None:
        return _compare(args, examples)
    llm, params = start_engine(args)
    scores = [score_task(llm, examples[task], params) for task in examples]
    print(format_table([COLUMNS, *(score.row() for score in scores)]))
    if args.json:
        _write_json(args.json, args, scores)
    return 0


def _compare(args: argparse.Namespace, examples: dict[str, list[Example]]) -> int:
    scores: list[ComparedScore] = []
    wanted = combinations(args)
    try:
        for score in compare(wanted, examples):
            scores.append(score)
            if args.json:
                _write_json(args.json, args, scores)
    finally:
        # A long run that is interrupted, or fails late, still shows what it found.
        if scores:
            print(comparison_table(scores))
    return 0


def _write_json(path: Path, args: argparse.Namespace, scores: Sequence[Any]) -> None:
    unwritten = ("command", "json", "passes_on_unknown", "run", "traceback", "unknown")
    report = {
        "settings": {name: value for name, value in vars(args).items() if name not in unwritten},
        "scores": [asdict(score) for score in scores],
    }
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
