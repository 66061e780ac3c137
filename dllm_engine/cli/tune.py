"""Find the fastest setting within a loss of accuracy, on your own tasks.

Searches cache method and its options, rule of parallel unmasking, several blocks at once and block length for the
fastest setting that loses at most so much accuracy against plain decoding (no cache, a token per pass). Run again, the
same command goes on where it stopped.
"""

import argparse
import hashlib
import random
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

from dllm_engine.checkpoints import load_config
from dllm_engine.cli.arguments import RULES, add_value, as_words, parse_rule, positive_int, split_names
from dllm_engine.cli.engine import ENGINE, add_engine_arguments, add_model, engine_arguments, given, load, prepare
from dllm_engine.cli.evaluate import add_own_task_arguments, own_tasks_of
from dllm_engine.demo import DEMO_MODELS
from dllm_engine.evaluation import tuning
from dllm_engine.evaluation.own_tasks import OwnTasks
from dllm_engine.evaluation.result_file import ResultFile
from dllm_engine.evaluation.runner import Cost, Runner
from dllm_engine.families import family_of
from dllm_engine.scheduler.methods import methods_for

FIRST_EXAMPLES = 32
"""Examples before a setting is judged at all."""
ORDER_SEED = 0
"""Examples are asked in a random order, the same in every run, so that the first ones are like all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_own_task_arguments(parser, parser)
    loss = "the most accuracy to lose, in percentage points (default: %(default)s)"
    add_value(parser, "--loss", float, "POINTS", loss, default=1.0)
    add_value(parser, "--batch --batch-size", positive_int, "N", "requests at once (default: %(default)s)", default=16)
    budget = "the search ends in this time (default: %(default)s)"
    add_value(parser, "--budget", float, "MINUTES", budget, default=60.0)
    add_value(parser, "--gen-length", positive_int, "N", "response tokens (default: the checkpoint's)")
    output = "all trials and the chosen setting (default: %(default)s)"
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
    if not args.budget > 0:
        raise ValueError(f"--budget {args.budget:g} is out of range: give minutes, more than 0")
    if args.tasks is None and args.model not in DEMO_MODELS:
        raise ValueError(f"nothing says what {args.model} is to answer; give --tasks FILE, with prompts and answers")
    prepare(args)
    runner = Runner(load)
    search = _search(args, runner)
    try:
        if not search.run():
            print("The budget ended the search early; the same command goes on where it stopped.", file=sys.stderr)
    finally:
        runner.stop()
        if search.plain.scores:
            _finish(args, search)
    return 0


def _search(args: argparse.Namespace, runner: Runner) -> tuning.Search:
    """The search for what ``args`` ask; raises ``ValueError`` for an output of other tasks or another model."""
    from dllm_engine.scheduler.options.request_options import DEFAULT_GEN_LENGTH
    from dllm_engine.scheduler.options.resolve import checkpoint_defaults

    tasks, *others = own_tasks_of(args)
    if others:
        raise ValueError(f"settings are compared on one file or demo task; leave out {others[0].name}")
    tasks = OwnTasks(tasks.name, list({repr(task): task for task in tasks.tasks}.values()), args.match)
    config, decoding = load_config(args.model), given(args, ("gen_length",))
    family, defaults = family_of(config), checkpoint_defaults(config) | decoding
    longest = defaults.get("gen_length") or DEFAULT_GEN_LENGTH
    space = tuning.space_of(
        args.model,
        family,
        methods_for(family.attention) if args.methods in (None, "all") else args.methods.split(","),
        default_block=min(defaults.get("block_length") or family.block_length_of(longest), longest),
        longest_block=longest,
        rules=_rules(args),
    )
    engine = {name: value for name, value in engine_arguments(args).items() if name not in tuning.PLAIN.engine}
    engine |= {"max_num_seqs": args.batch}
    examples = random.Random(ORDER_SEED).sample(range(len(tasks.tasks)), len(tasks.tasks))

    def ask(setting: tuning.Setting, indices: range) -> tuple[list[float], Cost]:
        scores = partial(
            tasks.scores,
            decoding=decoding | setting.decoding,
            examples=examples[indices.start : indices.stop],
        )
        return runner.run(engine | setting.engine, scores, label=str(setting))

    digest = hashlib.sha256(repr(tasks).encode()).hexdigest()[:16]
    subject = {"model": args.model, "tasks": tasks.name, "tasks_digest": digest, "decoding": decoding, "engine": engine}
    return tuning.Search(
        ask,
        ResultFile(args.output, "tune", subject),
        args.loss / 100,
        space,
        chunk=max(FIRST_EXAMPLES, 2 * args.batch),
        num_examples=len(examples),
        budget=60 * args.budget,
    )


def _rules(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.unmasking_rules is None:
        return list(tuning.RULES)
    rules = [options for _, options in map(parse_rule, split_names(args.unmasking_rules))]
    for options in rules:
        if len(options) != 1 or not options.keys() <= set(RULES) - {"slow_fast"}:
            raise ValueError(
                f"--unmasking-rules {args.unmasking_rules}: rules are searched as NAME=VALUE alone, without slow_fast "
                f"and without a guide; leave the rest out"
            )
    return rules


def _finish(args: argparse.Namespace, search: tuning.Search) -> None:
    """Print and write the result, which may be that of an interrupted search."""
    from dllm_engine.evaluation.hardware import provenance
    from dllm_engine.params import DiffusionParams

    trial = search.chosen
    engine, decoding = trial.setting.engine, trial.setting.decoding
    arguments = given(args, ENGINE) | dict(args.engine_arg) | engine
    named = "".join(f", {name}={value!r}" for name, value in arguments.items() if value != {})
    chosen = {"engine": engine, "decoding": decoding, **search.figures(trial)}
    search.save(command=shlex.join(["dllm", *args.argv]), machine=provenance(), chosen=chosen)
    print(
        tuning.report(search),
        "",
        f"    {shlex.join(['dllm', 'serve', args.model, *as_words(engine | decoding)])}",
        f"    llm = LLM({args.model!r}{named})",
        f"    params = {DiffusionParams(gen_length=args.gen_length, **decoding)!r}",
        "",
        f"wrote {args.output}; `dllm serve {args.model} --settings {args.output}` serves the chosen setting",
        sep="\n",
    )
