"""Compare accuracy, tokens/s and memory of cache methods and unmasking rules, in one table and plot.

Scores cache methods and ways of unmasking on the demo model's tasks, on your own, on those of lm-evaluation-harness or
on a paper's, with tokens per second and memory beside the scores. Run again with the same --output, it goes on where it
stopped.
"""

# Not `eval.py`: the module would hide Python's function from its importers.
import argparse
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from dllm_engine.checkpoints import load_config
from dllm_engine.cli.arguments import (
    GUIDED,
    ONE,
    RULES,
    add_value,
    assignments,
    method_text,
    parse_method,
    parse_rule,
    positive_int,
    split_names,
)
from dllm_engine.cli.engine import (
    DECODING,
    add_cache_arguments,
    add_decoding_arguments,
    add_engine_arguments,
    engine_arguments,
    given,
    load,
    prepare,
)
from dllm_engine.demo.tasks import TASKS
from dllm_engine.evaluation.comparison import COLUMNS, Combination, Comparison, Task, table, write_csv
from dllm_engine.evaluation.harness import HarnessTask, check_lm_eval
from dllm_engine.evaluation.likelihood import NUM_SAMPLES
from dllm_engine.evaluation.own_tasks import (
    DEMO_TASKS,
    HOLES,
    MATCHES,
    NEEDLE,
    OwnTask,
    OwnTasks,
    demo_tasks,
    read_tasks,
)
from dllm_engine.evaluation.paper_tasks import PAPERS, paper_table, tasks_of_papers
from dllm_engine.evaluation.plots import draw_heat_maps, draw_tradeoff, plot_beside
from dllm_engine.evaluation.result_file import ResultFile
from dllm_engine.families import family_of
from dllm_engine.scheduler.methods import methods_for
from dllm_engine.scheduler.options.request_fields import GUIDE_OPTIONS

DEMO_COUNT = 50
ANSWER_LENGTH = 32
"""Response tokens that hold the answers of the demo tasks."""
HARNESS = {"num_fewshot", "metric", "max_prompt_tokens", "seed", "mc_num", "count", "include_path"}
HARNESS |= {"confirm_run_unsafe_code"}
"""Arguments that are settings of a ``HarnessTask``."""
FREE = (
    *("tasks", "lm_eval", "paper_task", "paper_table", "methods", "unmasking_rules", "output", *RULES),
    *("cache_method", "cache_option", "guide_model", GUIDED, *GUIDE_OPTIONS),
    *("argv", "command", "run", "traceback", "unknown"),
)
"""Arguments that may differ between runs that fill the same table: they tell its rows apart, or change nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = f"{', '.join(TASKS)}, `{DEMO_TASKS}` for all in a row, `{NEEDLE}` in a haystack, `{HOLES}` to fill in"
    asked = add_task_arguments(parser, f"tasks of the demo model ({names})", "examples per task and cell of a heat map")
    add_value(asked, "--paper-table", str, "PAPER/TABLE", "the rows of a paper's table; docs/papers.md lists them")
    batch = "requests at once, on which speed and memory depend (default: the engine's max_num_seqs)"
    add_value(parser, "--batch --batch-size", positive_int, "N", batch)
    output = "write rows and answers as they are made, with a .csv and a .png of the same name beside it"
    add_value(parser, "--output", Path, "FILE.json", output)
    masks = "masks per continuation in likelihoods (default: %(default)s)"
    add_value(parser, "--mc-num", positive_int, "N", masks, default=NUM_SAMPLES)
    add_comparison_arguments(parser)
    add_decoding_arguments(parser)
    add_engine_arguments(parser)
    add_cache_arguments(parser)
    # The seed also draws the examples.
    parser.set_defaults(seed=0, cache_method="none")


def add_comparison_arguments(parser: argparse.ArgumentParser, more_names: str = "") -> None:
    """The arguments of ``combinations``; ``more_names`` of ``--unmasking-rules``."""
    group = parser.add_argument_group("comparison", "A row per cache method and unmasking rule.")
    methods = "cache methods, with options as in sparse:retention_ratio=0.25:0.5+pool_kernel_size=1; or `all`"
    add_value(group, "--methods", str, "NAME,…", methods)
    rules = f"`{ONE}` for one token per step, a policy such as `low_confidence`, NAME=VALUE with one of "
    rules += f"{', '.join(RULES)}, or {GUIDED}=MODEL with a guide, and behind it +NAME=VALUE of other options"
    add_value(group, f"--unmasking-rules {more_names}", str, "RULE,…", rules, dest="unmasking_rules")


def add_task_arguments(parser: argparse.ArgumentParser, tasks: str, count: str) -> "argparse._MutuallyExclusiveGroup":
    """The arguments of ``tasks_of``; returns the group of those that name tasks."""
    asked = parser.add_mutually_exclusive_group()
    tasks += ', or .jsonl files with lines {"prompt": "…", "answer": "…"}'
    add_value(asked, "--tasks", str, "NAME,…", f"{tasks} (default: the demo model's)")
    add_value(asked, "--lm-eval", str, "TASK,…", "tasks or groups of lm_eval by name, or YAML files")
    add_value(asked, "--paper-task", str, "BENCHMARK,…", "gsm8k, …, with the lengths and shots of a paper")
    add_value(parser, "--count", positive_int, "N", f"{count} (default: enough of the demo model's, of others all)")
    match = "when a response to --tasks is right: it is the answer but for white space around it, it contains the "
    match += "answer, or its last number is the answer's (default: %(default)s)"
    parser.add_argument("--match", choices=MATCHES, default="exact", help=match)
    harness = parser.add_argument_group("lm-evaluation-harness", "With --lm-eval and --paper-task.")
    add_value(harness, "--include-path", Path, "FOLDER", "more tasks, as YAML files")
    add_value(harness, "--paper", str, "NAME", f"whose settings: {', '.join(PAPERS)} (default: the first)")
    add_value(harness, "--num-fewshot", int, "N", "examples in the prompt (default: the task's)")
    add_value(harness, "--metric", str, "METRIC,FILTER", "the one to show (default: the first; --output has all)")
    add_value(harness, "--max-prompt-tokens", positive_int, "N", "cut longer prompts in their middle")
    plain = "give prompts as plain text, even where the tokenizer has a chat template"
    harness.add_argument("--no-chat-template", dest="chat_template", action="store_false", help=plain)
    unsafe = "run the programs that the model writes, which tasks such as humaneval score"
    harness.add_argument("--confirm-run-unsafe-code", action="store_true", help=unsafe)
    return asked


def run(args: argparse.Namespace) -> int:
    if args.paper_table is not None:
        asked = paper_table(args.paper_table)
        args.paper, args.paper_task, args.tasks = asked["paper"], asked["benchmarks"], None
        args.methods, args.unmasking_rules = args.methods or asked["methods"], args.unmasking_rules or asked["rules"]
    plot = None if args.output is None else plot_beside(args.output)
    tasks = tasks_of(args, DEMO_COUNT)
    wanted = combinations(args, args.batch)
    for task in tasks:
        if isinstance(task, HarnessTask):
            task.load()  # before a model is loaded: the data is what is missing most often
    subject = {name: value for name, value in vars(args).items() if name not in FREE}
    comparison = Comparison(wanted, tasks, ResultFile(args.output, "eval", subject), load)
    try:
        comparison.run()
    except KeyboardInterrupt:
        if args.output is not None:
            print(f"\nWhat was measured is in {args.output}; the same command goes on from there.", file=sys.stderr)
        raise
    finally:
        if comparison.scored:
            _finish(args, comparison, plot)
    return 1 if comparison.errors else 0


def tasks_of(args: argparse.Namespace, demo_count: int) -> list[Task]:
    """The tasks that ``args`` name. Those of the demo model get a short ``gen_length`` and ``demo_count`` examples if
    ``args`` do not say otherwise. Raises ``ValueError`` for an unknown task, and where data is missing."""
    if args.lm_eval is None and args.paper_task is None:
        names = (args.tasks or DEMO_TASKS).split(",")
        if args.gen_length is None and not any(name.endswith(".jsonl") for name in names):
            args.gen_length = ANSWER_LENGTH
        return [OwnTasks(name, _own_tasks(name, args, demo_count), args.match) for name in names]
    check_lm_eval()
    if args.lm_eval is not None:
        tasks = [HarnessTask(name) for name in args.lm_eval.split(",")]
    else:
        tasks = tasks_of_papers(args.model, args.paper_task.split(","), args.paper)
    own = given(args, HARNESS & vars(args).keys())
    return [replace(task, with_chat_template=task.with_chat_template and args.chat_template, **own) for task in tasks]


def combinations(args: argparse.Namespace, batch: int | None) -> list[Combination]:
    """Cache methods and unmasking rules of ``args``; raises ``ValueError`` for a value that is out of range."""
    from dllm_engine.params import DiffusionParams

    made = []
    shared = given(args, [name for name in DECODING if name not in (GUIDED, *GUIDE_OPTIONS)])
    for method, options in _methods(args):
        for text, guide, decoding in _rules(args):
            chosen = {"cache_method": method, "cache_option": list(options.items()), "guide_model": guide}
            row = argparse.Namespace(**vars(args) | chosen)
            prepare(row)
            engine = engine_arguments(row) | ({} if batch is None else {"max_num_seqs": batch})
            made.append(Combination(method_text(method, options), text, engine, shared | decoding))
            DiffusionParams(**made[-1].decoding)
    return made


def _methods(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    if args.methods is None:
        return [(args.cache_method, dict(args.cache_option))]
    if args.cache_method != "none" or args.cache_option:
        raise ValueError("--methods takes options itself (dual:refresh=near); leave out --cache-method and its options")
    is_all = args.methods == "all"
    texts = methods_for(family_of(load_config(args.model)).attention) if is_all else split_names(args.methods)
    return [chosen for text in texts for chosen in parse_method(text)]


def _rules(args: argparse.Namespace) -> list[tuple[str, str | None, dict[str, Any]]]:
    """Their names, guides and request options."""
    own, guiding = given(args, RULES), given(args, GUIDE_OPTIONS)
    guide = None if args.guided is False else args.guide_model
    named = GUIDED if guide is None else f"{GUIDED}={guide}"  # `guided` alone is by --guide-model
    if args.unmasking_rules is None:
        texts = [named if guide is not None else assignments(own) or ONE]
    elif own:
        raise ValueError(f"--unmasking-rules and --{next(iter(own)).replace('_', '-')} both say how to unmask")
    else:
        texts = [re.sub(rf"^{GUIDED}(?=\+|$)", named, text) for text in split_names(args.unmasking_rules)]
    rules = [(text, *parse_rule(text)) for text in texts]
    return [(text, model, options if model is None else guiding | options) for text, model, options in rules]


def _own_tasks(name: str, args: argparse.Namespace, demo_count: int) -> list[OwnTask]:
    if name.endswith(".jsonl"):
        return read_tasks(Path(name))[: args.count]
    return demo_tasks(name, args.count or demo_count, args.seed)


def _finish(args: argparse.Namespace, comparison: Comparison, plot: Path | None) -> None:
    """Print and write the rows, also those of a run that was interrupted or failed late."""
    rows = comparison.scored
    print(table([row.values for row in rows], COLUMNS))
    for key, why in comparison.errors.items():
        print(f"cannot be measured: {key}: {why}", file=sys.stderr)
    if args.output is None:
        return
    from dllm_engine.evaluation.hardware import provenance

    comparison.save(command=shlex.join(["dllm", *args.argv]), machine=provenance())
    written = [args.output, args.output.with_suffix(".csv")]
    write_csv([row.values for row in rows], written[-1])
    if plot is not None and any(row.answers.cost.requests for row in rows):
        draw_tradeoff([row.values for row in rows if row.answers.cost.requests], plot)
        written.append(plot)
    # A file of one's own may have the same name, but no parts.
    needles = [row for row in rows if row.task == NEEDLE and row.result and row.result.details]
    if plot is not None and needles:
        written.append(plot.with_suffix(".map.png"))
        draw_heat_maps(needles, written[-1])
    print(f"\nwrote {', '.join(map(str, written))}")
