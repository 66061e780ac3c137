"""Compare accuracy, tokens/s and memory of cache methods and unmasking rules, in one
table and plot.

Scores cache methods and ways of unmasking on the demo model's tasks, on your own, on
those of lm-evaluation-harness or on a paper's, with tokens per second and memory beside
the scores. Run again with the same --output, it goes on where it stopped.
"""

# Not named `eval.py`, because the module would hide Python's function for importers.
import argparse
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dllm_engine.cache_methods import methods_for
from dllm_engine.checkpoints import load_config
from dllm_engine.cli.arguments import (
    RULES,
    add_value,
    parse_method,
    parse_rule,
    positive_int,
    split_names,
)
from dllm_engine.cli.engine import (
    DECODING,
    add_decoding_arguments,
    add_engine_arguments,
    chosen_arguments,
    load,
    prepare,
    with_limit,
)
from dllm_engine.demo.tasks import TASKS
from dllm_engine.evaluation.comparison import (
    COLUMNS,
    Combination,
    Comparison,
    Task,
    table,
)
from dllm_engine.evaluation.harness import HarnessTask, check_lm_eval
from dllm_engine.evaluation.intents import INTENTS
from dllm_engine.evaluation.likelihood import NUM_SAMPLES
from dllm_engine.evaluation.own_tasks import (
    DECISIONS,
    DEMO_COUNT,
    DEMO_TASKS,
    MATCHES,
    named_task,
)
from dllm_engine.evaluation.paper_tasks import PAPERS, paper_table, tasks_of_papers
from dllm_engine.evaluation.plots import draw_reliability, draw_tradeoff, plot_beside
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.guidance import GuideOptions
from dllm_engine.text import method_text

FREE = (
    "tasks",
    "lm_eval",
    "paper_task",
    "paper_table",
    "methods",
    "unmasking_rules",
    "output",
    "argv",
    "command",
    "run",
    "traceback",
    "unknown",
)
"""Arguments that may differ between runs for the same table: rows contain them, or they
have no effect on results.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_mutually_exclusive_group()
    add_own_task_arguments(parser, sources)
    add_value(
        sources,
        "--lm-eval",
        str,
        "TASK,…",
        "tasks or groups of lm_eval by name, or YAML files",
    )
    add_value(
        sources,
        "--paper-task",
        str,
        "BENCHMARK,…",
        "gsm8k, …, with the lengths and shots of a paper",
    )
    add_value(
        sources,
        "--paper-table",
        str,
        "PAPER/TABLE",
        "the rows of a paper's table; docs/papers.md lists them",
    )
    add_value(
        parser,
        "--batch --batch-size",
        positive_int,
        "N",
        "requests at once (default: max_num_seqs)",
    )
    add_value(
        parser,
        "--output",
        Path,
        "FILE.json",
        "write each row as it is measured, with a .png beside it",
    )
    harness = parser.add_argument_group(
        "lm-evaluation-harness", "With --lm-eval and --paper-task."
    )
    add_value(harness, "--include-path", Path, "FOLDER", "more tasks, as YAML files")
    add_value(
        harness,
        "--paper",
        str,
        "NAME",
        f"whose settings: {', '.join(PAPERS)} (default: the first)",
    )
    add_value(
        harness,
        "--num-fewshot",
        int,
        "N",
        "examples in the prompt (default: the task's)",
    )
    add_value(
        harness,
        "--metric",
        str,
        "METRIC,FILTER",
        "the one to show (default: the first; --output has all)",
    )
    add_value(
        harness,
        "--max-prompt-tokens",
        positive_int,
        "N",
        "cut longer prompts in their middle",
    )
    add_value(
        harness,
        "--mc-num",
        positive_int,
        "N",
        "masks per continuation in likelihoods",
        default=NUM_SAMPLES,
    )
    harness.add_argument(
        "--no-chat-template",
        dest="chat_template",
        action="store_false",
        help="prompts as plain text",
    )
    harness.add_argument(
        "--confirm-run-unsafe-code",
        action="store_true",
        help="run programs that the model writes",
    )
    add_comparison_arguments(parser)
    parser.set_defaults(seed=0)  # the seed also draws the examples


def add_own_task_arguments(
    parser: argparse.ArgumentParser, group: argparse._ActionsContainer
) -> None:
    """Add arguments about the user's tasks, and the matching of answers."""
    tasks = (
        f"tasks of the demo model ({', '.join(TASKS)}, or `{DEMO_TASKS}`, the default, "
        f"for all in a row; "
        f"{' and '.join(DECISIONS)} with the rules passes=N, or others to generate the text), "
        f"{' or '.join(INTENTS)} (questions of the package jev-style), or "
        '.jsonl files with lines {"prompt": "…", "answer": "…"}'
    )
    add_value(group, "--tasks", str, "NAME,…", tasks)
    add_value(
        parser,
        "--count",
        positive_int,
        "N",
        f"examples (default: {DEMO_COUNT} of each demo task, else all)",
    )
    match = (
        "when a response to --tasks is right: it is the answer but for white space "
        "around it, it contains the "
        "answer, or its last number is the answer's (default: %(default)s)"
    )
    parser.add_argument("--match", choices=MATCHES, default="exact", help=match)


def add_comparison_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``combinations``."""
    group = parser.add_argument_group(
        "comparison", "A row per cache method and unmasking rule."
    )
    methods = (
        "cache methods, with options as in "
        "sparse:retention_ratio=0.25:0.5+pool_kernel_size=1; or `all` "
    )
    add_value(group, "--methods", str, "NAME,…", methods + "(default: none)")
    rules = (
        "`one` for one token per step (the default), a policy such as "
        "`low_confidence`, NAME=VALUE with one of "
        f"{', '.join(RULES)}, or guided=MODEL with a guide, and behind it +NAME=VALUE of other options"
    )
    add_value(group, "--unmasking-rules", str, "RULE,…", rules)
    add_decoding_arguments(
        parser, without=(*RULES, "unmasking", *GuideOptions.model_fields)
    )
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.paper_table is not None:
        paper_rows = paper_table(args.paper_table)
        args.paper = paper_rows["paper"]
        args.paper_task = paper_rows["benchmarks"]
        args.tasks = None
        args.methods = args.methods or paper_rows["methods"]
        args.unmasking_rules = args.unmasking_rules or paper_rows["rules"]
    plot = plot_beside(args.output)
    tasks = tasks_of(args)
    combined = combinations(args, args.batch)
    for task in tasks:
        if isinstance(task, HarnessTask):
            # Check this before a model is loaded, because often the data is missing.
            task.check()
    with Comparison(args.output, args.command, subject_of(args), load) as comparison:
        comparison.add(combined, tasks)
        try:
            comparison.run()
        finally:
            comparison.stop()
            if comparison.scored:
                print(table([row.values for row in comparison.scored], COLUMNS))
                finish(args, comparison)
                draw_tradeoff(comparison.scored, plot)
                draw_reliability(comparison.scored, plot)
    return 1 if comparison.errors else 0


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """The tasks that ``args`` name. Raises ``ValueError`` for an unknown task."""
    if args.lm_eval is None and args.paper_task is None:
        return own_tasks_of(args)
    check_lm_eval()
    if args.lm_eval is not None:
        tasks = [HarnessTask(name) for name in args.lm_eval.split(",")]
    else:
        tasks = tasks_of_papers(args.model, args.paper_task.split(","), args.paper)
    settings = chosen_arguments(args, (field.name for field in fields(HarnessTask)))
    return [
        replace(
            task,
            with_chat_template=task.with_chat_template and args.chat_template,
            **settings,
        )
        for task in tasks
    ]


def own_tasks_of(args: argparse.Namespace) -> list[Task]:
    """The tasks of ``--tasks``. Tasks of the demo model get a short ``gen_length`` if
    ``args`` have none.
    """
    names = (args.tasks or DEMO_TASKS).split(",")
    if args.gen_length is None and not any(name.endswith(".jsonl") for name in names):
        args.gen_length = 32  # enough for all answers
    return [named_task(name, args.count, args.seed, args.match) for name in names]


def combinations(args: argparse.Namespace, batch: int | None) -> list[Combination]:
    """Combinations of the cache methods and unmasking rules of ``args``. Raises
    ``ValueError`` for a value that is out of range.
    """
    shared = prepare(args) | ({} if batch is None else {"max_num_seqs": batch})
    from dllm_engine.params import DiffusionParams

    methods = split_names(args.methods or "none")
    if methods == ["all"]:
        methods = methods_for(load_config(args.model).family.attention)
    combined = []
    for method, options in (
        chosen for text in methods for chosen in parse_method(text)
    ):
        for rule in split_names(args.unmasking_rules or "one"):
            guide, decoding = parse_rule(rule)
            method_arguments = {
                "cache_method": method,
                "cache_options": options,
                "guide_model": guide,
            }
            EngineOptions.parse(method_arguments)
            decoding = with_limit(chosen_arguments(args, DECODING) | decoding)
            DiffusionParams(**decoding)
            engine = shared | method_arguments | dict(args.engine_arg)
            combined.append(
                Combination(method_text(method, options), rule, engine, decoding)
            )
    return combined


def subject_of(args: argparse.Namespace) -> dict[str, Any]:
    """Model and settings that all rows of a table depend on."""
    return {name: value for name, value in vars(args).items() if name not in FREE}


def finish(args: argparse.Namespace, comparison: Comparison, **more: Any) -> None:
    """Print errors, and write the rows and ``more``, even if the run was interrupted or
    failed late.
    """
    for key, why in comparison.errors.items():
        print(f"cannot be measured: {key}: {why}", file=sys.stderr)
    if args.output is not None:
        from dllm_engine.evaluation.hardware import provenance

        comparison.save(
            command=shlex.join(["dllm", *args.argv]), machine=provenance(), **more
        )
        print(
            f"\nwrote {args.output}"
            + ("; the same command goes on from there" if comparison.missing else "")
        )
