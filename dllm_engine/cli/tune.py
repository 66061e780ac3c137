"""Find the fastest setting within a loss of accuracy, on your own tasks.

Searches cache method and its options, rule of parallel unmasking, several blocks at once and block length for the
fastest setting that loses at most so much accuracy against plain decoding (no cache, a token per pass). Run again, the
same command goes on where it stopped.
"""

import argparse
import random
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dllm_engine.checkpoints import load_config
from dllm_engine.cli.arguments import RULES, add_value, as_words, parse_rule, positive_int, positive_ints, split_names
from dllm_engine.cli.engine import ENGINE, add_engine_arguments, add_model, engine_arguments, given, load, prepare
from dllm_engine.cli.evaluate import add_task_arguments, tasks_of
from dllm_engine.demo import DEMO_MODELS
from dllm_engine.evaluation import tuning
from dllm_engine.evaluation.comparison import Task
from dllm_engine.evaluation.own_tasks import OwnTasks
from dllm_engine.evaluation.plots import plot_beside
from dllm_engine.evaluation.result_file import ResultFile
from dllm_engine.evaluation.runner import Answers, Cost, Runner
from dllm_engine.evaluation.tuning import PLAIN, Search, Setting, Space, draw, report
from dllm_engine.families import family_of
from dllm_engine.scheduler.methods import methods_for

DEMO_COUNT = 100
"""Examples per demo task."""
BUDGET, DEMO_BUDGET = 60.0, 9.0
"""Minutes."""
MIN_AT_ONCE = 16
"""Requests at once while examples are answered, whatever the batch sizes: accuracy does not depend on them."""
ORDER_SEED = 0
"""Examples are asked in a random order, the same in every run, so that the first ones are like all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_task_arguments(parser, "tasks", "the most examples")
    loss = "the most accuracy to lose, in percentage points (default: %(default)s)"
    add_value(parser, "--loss", float, "POINTS", loss, default=1.0)
    batch = "requests at once; each gets a setting of its own (default: 1,16)"
    add_value(parser, "--batch --batch-size", positive_ints, "N,…", batch, default=[1, 16])
    budget = f"the search ends in this time (default: {BUDGET:g}; demo tasks: {DEMO_BUDGET:g})"
    add_value(parser, "--budget", float, "MINUTES", budget)
    add_value(parser, "--gen-length", positive_int, "N", "response tokens (default: the task's or checkpoint's)")
    output = "all trials and the chosen settings, with a plot of the same name beside it (default: %(default)s)"
    add_value(parser, "--output", Path, "FILE", output, default=Path("tune.json"))
    narrowed = parser.add_argument_group("search", "To search less.")
    add_value(narrowed, "--methods", str, "NAME,…", "cache methods (default: all)")
    rules = f"NAME=VALUE with one of {', '.join(RULES)} (default: some values of each rule)"
    add_value(narrowed, "--unmasking-rules", str, "RULE,…", rules)
    add_engine_arguments(parser, with_model=False)
    parser.set_defaults(seed=0)


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.loss <= 100:
        raise ValueError(f"--loss {args.loss:g} is out of range: give percentage points from 0 to 100")
    if args.budget is not None and not args.budget > 0:
        raise ValueError(f"--budget {args.budget:g} is out of range: give minutes, more than 0")
    plot = plot_beside(args.output)
    prepare(args)
    task, runner = _task(args), Runner(load)
    search = _search(args, task, runner)
    try:
        with tqdm(total=60 * args.budget, bar_format="{percentage:3.0f}% |{bar:20}| {desc}", leave=False) as bar:
            search.tell = partial(_tell, bar)
            is_through = search.run()
        if not is_through:
            print("The budget ended the search early; the same command goes on where it stopped.", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"\nWhat was measured is in {args.output}; the same command goes on from there.", file=sys.stderr)
        raise
    finally:
        runner.stop()
        if set(args.batch) <= search.plain.speeds.keys():
            _finish(args, search, task, plot)
    return 0


def _task(args: argparse.Namespace) -> Task:
    asks_demo_tasks = args.tasks is None and args.lm_eval is None and args.paper_task is None
    if asks_demo_tasks and args.model not in DEMO_MODELS:
        raise ValueError(
            f"nothing says what {args.model} is to answer; give --tasks FILE with your own prompts and answers, or "
            f"--lm-eval or --paper-task"
        )
    args.budget = args.budget or (DEMO_BUDGET if asks_demo_tasks else BUDGET)
    task, *others = tasks_of(args, DEMO_COUNT)
    if others:
        raise ValueError(f"settings are compared on one task, or a group of lm_eval; leave out {others[0].name}")
    if isinstance(task, OwnTasks):  # one that is there twice is asked once
        task = replace(task, tasks=list({repr(own): own for own in task.tasks}.values()))
    return task


def _rules(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.unmasking_rules is None:
        return list(tuning.RULES)
    rules = [options for _, options in map(parse_rule, split_names(args.unmasking_rules))]
    for name in (name for options in rules for name in options):
        if name not in RULES or name == "slow_fast":
            why = "varied anyway" if name == "block_add_threshold" else "not searched"
            raise ValueError(f"--unmasking-rules {args.unmasking_rules}: {name} is {why}; leave it out")
    return rules


def _search(args: argparse.Namespace, task: Task, runner: Runner) -> Search:
    """The search for what ``args`` ask; raises ``ValueError`` for an output of other tasks or another model."""
    from dllm_engine.scheduler.options.request_options import DEFAULT_GEN_LENGTH
    from dllm_engine.scheduler.options.resolve import checkpoint_defaults

    engine = {name: value for name, value in engine_arguments(args).items() if name not in PLAIN.engine}
    at_once = engine.setdefault("max_num_seqs", max(MIN_AT_ONCE, *args.batch))
    if at_once < max(args.batch):
        raise ValueError(f"max_num_seqs={at_once} is less than --batch {max(args.batch)}; raise it, or leave it out")
    config, decoding = load_config(args.model), given(args, ("gen_length",))
    family, defaults = family_of(config), checkpoint_defaults(config) | task.decoding | decoding
    longest = defaults.get("gen_length") or DEFAULT_GEN_LENGTH
    space = Space.of_model(
        args.model,
        family,
        methods_for(family.attention) if args.methods in (None, "all") else args.methods.split(","),
        default_block=min(defaults.get("block_length") or family.block_length_of(longest), longest),
        longest_block=longest,
        rules=_rules(args),
    )
    subject = {"model": args.model, **task.subject, "decoding": decoding, "engine": engine}
    size = min(task.size, args.count or task.size)
    examples = random.Random(ORDER_SEED).sample(range(task.size), size)

    def ask(setting: Setting, indices: range, at_once: int) -> tuple[list[float], Cost]:
        answers, own = Answers(), decoding | setting.decoding
        asked = partial(task.scores, decoding=own, examples=examples[indices.start : indices.stop])
        return runner.run(engine | setting.engine, asked, answers, at_once), answers.cost

    file = ResultFile(args.output, "tune", subject)
    how = {"batches": args.batch, "at_once": at_once, "num_examples": size, "budget": 60 * args.budget}
    return Search(ask, file, args.loss / 100, space, **how)


def _tell(bar: Any, what: str, left: float) -> None:
    """Show what is measured now and the seconds left at most."""
    bar.n = min(bar.total, bar.total - left)
    bar.set_description_str(f"at most {tqdm.format_interval(max(0, left))} left, {what}")


def _finish(args: argparse.Namespace, search: Search, task: Task, plot: Path | None) -> None:
    """Print and write the result, which may be that of an interrupted search."""
    from dllm_engine.evaluation.hardware import provenance
    from dllm_engine.params import DiffusionParams

    brought = {name: value for name, value in task.decoding.items() if name == "block_length"}
    length = args.gen_length or task.decoding.get("gen_length")
    chosen, commands = {}, {}
    for batch in dict.fromkeys(args.batch):
        trial = search.chosen(batch)
        engine, decoding = trial.setting.engine, brought | trial.setting.decoding
        chosen[str(batch)] = {"engine": engine, "decoding": decoding, **search.figures(batch, trial)}
        arguments = given(args, ENGINE) | dict(args.engine_arg) | engine
        named = "".join(f", {name}={value!r}" for name, value in arguments.items() if value != {})
        commands[batch] = [
            shlex.join(["dllm", "serve", args.model, *as_words(engine | decoding)]),
            f"llm = LLM({args.model!r}{named})",
            f"params = {DiffusionParams(gen_length=length, **decoding)!r}",
        ]
    print(report(search, commands))
    search.save(command=shlex.join(["dllm", *args.argv]), machine=provenance(), chosen=chosen)
    print(f"\nwrote {args.output}; `dllm serve {args.model} --settings {args.output}` serves the chosen setting")
    if plot is not None:
        draw(search, list(commands), plot)
        print(f"wrote {plot}")
