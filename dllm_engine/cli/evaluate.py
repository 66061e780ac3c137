"""``dllm eval``: how many of the demo tasks, or of lm-evaluation-harness's, a model solves, and what that costs. And
``dllm lm-eval``, the harness's own command.

Not ``eval.py``: the module would hide Python's function from its importers.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from dllm_engine.cli.arguments import GUIDED, GUIDING, ONE, RULES, positive_int, rule_options, split_rules
from dllm_engine.cli.engine import (
    add_decoding_arguments,
    add_engine_arguments,
    decoding_options,
    engine_arguments,
    given,
    load,
    prepare,
    start_engine,
)
from dllm_engine.demo.tasks import TASKS, Example, make_examples
from dllm_engine.evaluation.comparison import COLUMNS as COMPARISON_COLUMNS
from dllm_engine.evaluation.comparison import Combination, ComparedScore, compare
from dllm_engine.evaluation.harness import COLUMNS as HARNESS_COLUMNS
from dllm_engine.evaluation.harness import (
    HarnessScore,
    HarnessSettings,
    HarnessTask,
    check_lm_eval,
    run_harness,
    tasks_of_papers,
)
from dllm_engine.evaluation.likelihood import NUM_SAMPLES
from dllm_engine.evaluation.paper_tasks import PAPERS
from dllm_engine.evaluation.score import COLUMNS, score_task
from dllm_engine.evaluation.tradeoff_plot import TradeoffPoint, check_plot, draw_tradeoff
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.text import format_table, json_rows
from dllm_engine.vllm_hooks.release import check_release

DEMO_COUNT = 50
ANSWER_LENGTH = 32
"""Response tokens that hold the answers of the demo tasks."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "eval",
        help="score a model on the demo tasks, or on those of lm-evaluation-harness",
        description=f"Score a model on the tasks {', '.join(TASKS)}, or on tasks of lm-evaluation-harness. Responses "
        "to the first have 32 tokens in blocks of 8 unless asked otherwise; the same seed (default: 0) gives the same "
        "examples.",
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--tasks", default=",".join(TASKS), metavar="NAME,…", help="default: %(default)s")
    asked.add_argument("--lm-eval", metavar="TASK,…", help="tasks or groups of lm_eval by name, or YAML files")
    asked.add_argument("--paper-task", metavar="BENCHMARK,…", help="gsm8k, …, with the lengths and shots of a paper")
    parser.add_argument(
        "--count",
        type=positive_int,
        metavar="N",
        help=f"examples per task (default: {DEMO_COUNT}; of lm_eval's tasks all)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the scores and settings to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw accuracy against speed into a .png")
    parser.add_argument(
        "--plot-per",
        choices=("second", "forward"),
        default="second",
        help="unit of its speed: tokens per second or pass",
    )
    harness = add_harness_arguments(parser)
    harness.add_argument(
        "--mc-num",
        type=positive_int,
        default=NUM_SAMPLES,
        metavar="N",
        help="masks per continuation in likelihoods (default: %(default)s)",
    )
    compared = parser.add_argument_group(
        "comparison", "A row per combination, over all demo tasks, instead of one per task."
    )
    compared.add_argument("--methods", metavar="NAME,…", help="cache methods, with their papers' settings; or `all`")
    compared.add_argument(
        "--unmasking-rules",
        metavar="RULE,…",
        help=f"`{ONE}` for one token per step, `{GUIDED}` with --guide-model, or NAME=VALUE with one of "
        f"{', '.join(RULES)}",
    )
    add_decoding_arguments(parser)
    add_engine_arguments(parser)
    # It also draws the examples.
    parser.set_defaults(run=run, seed=0)
    _add_lm_eval_parser(commands)


def _add_lm_eval_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "lm-eval",
        help="the command of lm-evaluation-harness, which then knows `--model dllm`",
        usage="dllm lm-eval [arguments of `lm_eval`]",
        description="For example: dllm lm-eval --model dllm --model_args pretrained=demo,cache_method=sparse --tasks "
        "TASK. Releases of lm_eval that look for plugins know the model under their own command too.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run_lm_eval, passes_on_unknown=True)


def add_harness_arguments(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """How tasks of lm_eval are asked."""
    harness = parser.add_argument_group("lm-evaluation-harness", "With --lm-eval and --paper-task.")
    harness.add_argument("--include-path", type=Path, metavar="FOLDER", help="more tasks, as YAML files")
    harness.add_argument("--paper", metavar="NAME", help=f"whose settings: {', '.join(PAPERS)} (default: the first)")
    harness.add_argument("--num-fewshot", type=int, metavar="N", help="examples in the prompt (default: the task's)")
    harness.add_argument(
        "--metric", metavar="METRIC,FILTER", help="of several the one to show (default: the first; --json has all)"
    )
    harness.add_argument(
        "--no-chat-template",
        dest="chat_template",
        action="store_false",
        help="give prompts as plain text, even where the tokenizer has a chat template",
    )
    harness.add_argument(
        "--max-prompt-tokens", type=positive_int, metavar="N", help="cut longer prompts in their middle"
    )
    harness.add_argument(
        "--confirm-run-unsafe-code",
        action="store_true",
        help="run the programs that the model writes, which tasks such as humaneval score",
    )
    return harness


def run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        check_plot(args.plot)
    if args.lm_eval is not None or args.paper_task is not None:
        return _run_harness(args)
    for name, value in {"gen_length": ANSWER_LENGTH, "count": DEMO_COUNT}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    tasks = args.tasks.split(",")
    examples = {task: make_examples(task, args.count, args.seed) for task in tasks}
    if args.methods is not None or args.unmasking_rules is not None:
        return _compare(args, examples)
    if args.plot is not None:
        raise ValueError("--plot shows combinations; name some with --methods or --unmasking-rules")
    llm, params = start_engine(args)
    scores = [score_task(llm, examples[task], params) for task in examples]
    print(format_table([COLUMNS, *(score.row() for score in scores)]))
    if args.json:
        _write_json(args.json, args, scores)
    return 0


def run_lm_eval(args: argparse.Namespace) -> int:
    """lm_eval's own command, with our model registered."""
    check_release()
    check_lm_eval()
    from lm_eval.__main__ import cli_evaluate

    import dllm_engine.evaluation.lm_eval_model  # noqa: F401 - registers the model

    sys.argv = ["lm_eval", *args.unknown]
    cli_evaluate()
    return 0


def combinations(args: argparse.Namespace) -> list[Combination]:
    """What ``--methods`` and ``--unmasking-rules`` ask for, checked; raises ``ValueError`` naming what is wrong."""
    own, guiding = given(args, RULES), given(args, GUIDING)
    has_guide = args.guide_model is not None
    if args.unmasking_rules is None:
        way = GUIDED if has_guide and args.guided is not False else ONE
        rules = {",".join(f"{name}={value}" for name, value in own.items()) or way: own | guiding}
    elif own:
        raise ValueError(f"--unmasking-rules and --{next(iter(own)).replace('_', '-')} both say how to unmask")
    else:
        rules = {text: rule_options(text, guiding if has_guide else None) for text in split_rules(args.unmasking_rules)}
    methods = [args.cache_method]
    if args.methods is not None:
        if args.cache_method != "none" or args.cache_option:
            raise ValueError("--methods takes the papers' settings; leave out --cache-method and --cache-option")
        methods = list(CACHE_METHODS) if args.methods == "all" else args.methods.split(",")
    made = []
    for method in methods:
        of_method = argparse.Namespace(**vars(args) | {"cache_method": method})
        prepare(of_method)
        engine = engine_arguments(of_method)
        decoding = {name: value for name, value in decoding_options(args).items() if name not in GUIDING}
        made += [Combination(method, rule, engine, decoding | rules[rule]) for rule in rules]
    for combination in made:
        combination.params()
    return made


def harness_tasks(args: argparse.Namespace) -> list[HarnessTask]:
    """What ``--lm-eval`` or ``--paper-task`` asks for; raises ``ValueError`` for an unknown benchmark."""
    if args.lm_eval is not None:
        tasks = [HarnessTask(name) for name in args.lm_eval.split(",")]
    else:
        tasks = tasks_of_papers(args.model, args.paper_task.split(","), args.paper)
    own = given(args, ("num_fewshot", "metric", "max_prompt_tokens"))
    return [replace(task, **own) for task in tasks]


def _compare(args: argparse.Namespace, examples: dict[str, list[Example]]) -> int:
    scores: list[ComparedScore] = _collected(compare(combinations(args), examples, load), COMPARISON_COLUMNS, args)
    if args.plot is not None:
        name = "exact match: " + ", ".join(examples)
        draw_tradeoff(
            [
                TradeoffPoint(name, s.cache_method, s.unmasking, speed, s.exact_match, s.exact_match_error)
                for s in scores
                if (speed := _speed(s, args.plot_per)) is not None
            ],
            args.plot,
            args.plot_per,
        )
    return 0


def _speed(score: ComparedScore | HarnessScore, per: str) -> float | None:
    """Response tokens per second or per forward pass; None where no response was asked for."""
    if score.forwards_per_token is None:
        return None
    return score.tokens_per_second if per == "second" else 1 / score.forwards_per_token


def _run_harness(args: argparse.Namespace) -> int:
    check_lm_eval()
    settings = HarnessSettings(**{field.name: getattr(args, field.name) for field in fields(HarnessSettings)})
    found = run_harness(harness_tasks(args), combinations(args), settings, load)
    scores: list[HarnessScore] = _collected(found, HARNESS_COLUMNS, args)
    if args.plot is not None:
        points = [
            TradeoffPoint(f"{s.task}: {s.metric}", s.cache_method, s.unmasking, speed, s.score, s.stderr)
            for s in scores
            if (speed := _speed(s, args.plot_per)) is not None
        ]
        if not points:
            raise ValueError("nothing to plot: likelihoods are computed without a cache, so no method is faster")
        draw_tradeoff(points, args.plot, args.plot_per)
    return 0


def _collected(found: Iterable[Any], columns: Sequence[str], args: argparse.Namespace) -> list[Any]:
    """All scores; a long run that is interrupted or fails late still prints and writes those it found."""
    scores: list[Any] = []
    try:
        for score in found:
            scores.append(score)
            if args.json:
                _write_json(args.json, args, scores)
    finally:
        if scores:
            print(format_table([columns, *(score.row() for score in scores)]))
    return scores


def _write_json(path: Path, args: argparse.Namespace, scores: Sequence[Any]) -> None:
    unwritten = ("argv", "command", "json", "passes_on_unknown", "run", "traceback", "unknown")
    asked = {name: value for name, value in vars(args).items() if name not in unwritten}
    report = {
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in asked.items()},
        "scores": [asdict(score) for score in scores],
    }
    path.write_text(json_rows(report, depth=2) + "\n", encoding="utf-8")
