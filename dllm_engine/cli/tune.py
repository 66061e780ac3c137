"""Find the fastest setting within a loss of accuracy, on your own tasks.

Searches cache method and its options, rule of parallel unmasking, several blocks at
once and block length for the fastest setting that loses at most so much accuracy
against plain decoding (no cache, a token per pass). Run again, the same command goes on
where it stopped.
"""

import argparse
import hashlib
import shlex
from pathlib import Path
from typing import Any

from dllm_engine.cli.arguments import (
    RULES,
    add_value,
    as_words,
    parse_rule,
    positive_int,
    split_names,
)
from dllm_engine.cli.engine import (
    ENGINE,
    add_engine_arguments,
    add_model,
    chosen_arguments,
    load,
    prepare,
)
from dllm_engine.cli.evaluate import add_own_task_arguments, finish, own_tasks_of
from dllm_engine.demo import DEMO_MODELS
from dllm_engine.evaluation import tuning
from dllm_engine.evaluation.comparison import COLUMNS, Comparison, table
from dllm_engine.evaluation.plots import draw_tradeoff, plot_beside
from dllm_engine.options import EngineOptions

LEAST_SHARED_PART = 0.1
"""Share of the prompts in common beginnings from which sharing is worthwhile."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_own_task_arguments(parser, parser)
    add_value(
        parser,
        "--loss",
        float,
        "POINTS",
        "the most accuracy to lose, in percentage points",
        default=1.0,
    )
    add_value(
        parser,
        "--batch --batch-size",
        positive_int,
        "N",
        "requests at once",
        default=16,
    )
    add_value(
        parser,
        "--budget",
        float,
        "MINUTES",
        "the search ends in this time",
        default=60.0,
    )
    add_value(
        parser,
        "--gen-length",
        positive_int,
        "N",
        "response tokens (default: the checkpoint's)",
    )
    add_value(
        parser,
        "--output",
        Path,
        "FILE",
        "the rows and the choice; a plot beside it",
        default=Path("tune.json"),
    )
    narrowed = parser.add_argument_group("search", "To search less.")
    add_value(narrowed, "--methods", str, "NAME,…", "cache methods (default: all)")
    rules = (
        f"NAME=VALUE with one of {', '.join(RULES)} (default: some values of each rule)"
    )
    add_value(narrowed, "--unmasking-rules", str, "RULE,…", rules)
    add_engine_arguments(parser, with_model=False)
    parser.set_defaults(seed=0)


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.loss <= 100:
        raise ValueError(
            f"--loss {args.loss:g} is out of range: give percentage points from 0 to "
            f"100"
        )
    if not args.budget > 0:
        raise ValueError(
            f"--budget {args.budget:g} is out of range: give minutes, more than 0"
        )
    if args.tasks is None and args.model not in DEMO_MODELS:
        raise ValueError(
            f"nothing says what {args.model} is to answer; give --tasks FILE, with "
            f"prompts and answers"
        )
    engine = prepare(args) | {"max_num_seqs": args.batch}
    plot = plot_beside(args.output)
    (tasks, *others), decoding = (
        own_tasks_of(args),
        chosen_arguments(args, ("gen_length",)),
    )
    if others:
        raise ValueError(
            f"settings are compared on one file or demo task; leave out "
            f"{others[0].name}"
        )
    digest = hashlib.sha256(repr(tasks).encode()).hexdigest()[:16]
    subject = {
        "model": args.model,
        "tasks_digest": digest,
        "decoding": decoding,
        "engine": engine,
    }
    methods = None if args.methods in (None, "all") else args.methods.split(",")
    page_size = engine.get("page_size", EngineOptions().page_size)
    shares_beginning = tasks.shared_part(page_size) >= LEAST_SHARED_PART
    space = tuning.space_of(
        args.model, methods, _rules(args), decoding, begin_alike=shares_beginning
    )
    with Comparison(args.output, "tune", subject, load) as comparison:
        search = tuning.Search(
            comparison, tasks, space, engine, decoding, args.loss / 100
        )
        try:
            search.run(60 * args.budget)
        finally:
            comparison.stop()
            if search.plain.is_measured:
                rows = sorted(
                    comparison.scored, key=lambda row: -row.cost.tokens_per_second
                )
                print(table([row.values for row in rows], COLUMNS))
                _finish(args, search, comparison)
                draw_tradeoff(comparison.scored, plot)
    return 0


def _rules(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.unmasking_rules is None:
        return list(tuning.RULES)
    rules = [
        options for _, options in map(parse_rule, split_names(args.unmasking_rules))
    ]
    for options in rules:
        if len(options) != 1 or not options.keys() <= set(RULES) - {"slow_fast"}:
            raise ValueError(
                f"--unmasking-rules {args.unmasking_rules}: rules are searched as "
                f"NAME=VALUE alone, without slow_fast and without a guide; leave the "
                f"rest out"
            )
    return rules


def _finish(
    args: argparse.Namespace, search: tuning.Search, comparison: Comparison
) -> None:
    """Print and write the chosen setting. The search may have been interrupted."""
    from dllm_engine.params import DiffusionParams

    (setting, row), figures = search.best, search.figures()
    loss, lowest, highest = (
        100 * figures[name] for name in ("loss", "loss_lowest", "loss_highest")
    )
    arguments = (
        chosen_arguments(args, (*ENGINE, *EngineOptions.model_fields))
        | dict(args.engine_arg)
        | setting.engine
    )
    named = "".join(
        f", {name}={value!r}" for name, value in arguments.items() if value != {}
    )
    print(
        f"\nChosen: {row.method} {row.unmasking}, {figures['tokens_per_second']:.0f} "
        f"tokens/s; plain decoding {figures['plain_tokens_per_second']:.0f}.",
        f"On {figures['examples']} examples it loses {loss:.1f} points (90 % interval "
        f"{lowest:.1f} … {highest:.1f}).\n",
        f"    "
        f"{shlex.join(['dllm', 'serve', args.model, *as_words(setting.engine | setting.decoding)])}",
        f"    llm = LLM({args.model!r}{named})",
        f"    params = "
        f"{DiffusionParams(gen_length=args.gen_length, **setting.decoding)!r}",
        sep="\n",
    )
    finish(
        args,
        comparison,
        chosen={"engine": setting.engine, "decoding": setting.decoding, **figures},
    )
