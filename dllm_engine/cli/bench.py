"""``dllm bench``: speed and memory of the cache methods, in one run."""

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_engine.bench.report import HOW, SCHEMA, Report, comparison, tables
from dllm_engine.cli.arguments import (
    GUIDED,
    GUIDING,
    ONE,
    RULES,
    add_options,
    parse_rule,
    positive_int,
    positive_ints,
    split_names,
)
from dllm_engine.cli.engine import DTYPES, add_engine_arg, given
from dllm_engine.demo import DEMO_MODEL
from dllm_engine.evaluation.result_file import check_folder_of, read_results
from dllm_engine.evaluation.tradeoff_plot import can_plot
from dllm_engine.options import GUIDE_SETTINGS, EngineOptions
from dllm_engine.quiet import be_quiet
from dllm_engine.scheduler.methods import methods_for
from dllm_engine.scheduler.options.request_fields import RequestOptions
from dllm_engine.text import json_rows
from dllm_engine.vllm_hooks.release import check_release

if TYPE_CHECKING:
    from dllm_engine.bench.subject import BenchSettings, Unmasking

QUICK_OUTPUT, QUICK_PLOTS = Path("bench.json"), Path("bench-plots")
DEFAULTS: dict[str, Any] = {
    "model": DEMO_MODEL,
    "methods": "all",
    "unmasking": ONE,
    "batch": [1, 8],
    "prompt": [128, 512],
    "response": 64,
    "block_length": None,
    "repeats": 3,
    "dtype": "auto",
}
_QUICK = {"batch": [1, 4], "response": 32, "repeats": 3, "dtype": "float32"}
QUICK: tuple[dict[str, Any], ...] = (
    _QUICK | {"prompt": [64], "unmasking": f"{ONE},threshold=0.9"},
    _QUICK | {"model": "llada-8b/16", "prompt": [256], "block_length": 16},
)
"""What ``--quick`` measures: a trained model, whose responses end, and a larger one for its times."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed and memory of the cache methods in one run",
        description="Measures every cache method with every way of unmasking, batch and prompt length, in rounds over "
        "all of them, beside the same model in plain PyTorch. Tokens count up to the end token of a response, prompts "
        "never. Times are compared with a floor: the step's matrix products alone, on this machine.",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a first look: two small models, some minutes; other arguments narrow or widen it",
    )
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar="FILE", help="measure nothing; print ratios of two result files"
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--model",
        help="`demo`, `demo-blocks`, folder or Hugging Face name of a checkpoint, or random weights of a shape: "
        "`llada-8b`, `llada-moe-7b`, `dream-7b`, `sdar-8b`, `sdar-8b-b32`, `sdar-30b`, `llada2-mini`, or `llada-8b/4` "
        "with a quarter of width, heads, layers and vocabulary (default: demo)",
    )
    what.add_argument("--methods", metavar="NAME,…", help="cache methods (default: all that suit the model)")
    what.add_argument(
        "--unmasking",
        metavar="RULE,…",
        help=f"`{ONE}` for one token per step, a policy such as `low_confidence`, NAME=VALUE with one of "
        f"{', '.join(RULES)}, or `{GUIDED}` (default: {ONE}; with --guide-model also {GUIDED})",
    )
    what.add_argument(
        "--batch", "--batch-size", type=positive_ints, metavar="N,…", help="requests at once (default: 1,8)"
    )
    what.add_argument(
        "--prompt", "--input-len", type=positive_ints, metavar="N,…", help="prompt tokens (default: 128,512)"
    )
    what.add_argument(
        "--response", "--output-len", type=positive_int, metavar="N", help="response tokens (default: 64)"
    )
    what.add_argument(
        "--block-length", type=positive_int, metavar="N", help="default: the model's, `demo` 8; at most --response"
    )
    what.add_argument(
        "--shared-prefix",
        type=positive_int,
        metavar="N",
        default=0,
        help="the first N tokens of a batch's prompts are the same; for random weights (default: 0)",
    )
    what.add_argument("--no-baseline", action="store_true", help="leave out the plain PyTorch model")
    guide = parser.add_argument_group("guide")
    add_options(guide, EngineOptions, GUIDE_SETTINGS)
    add_options(guide, RequestOptions, GUIDING)
    how = parser.add_argument_group("how")
    how.add_argument("--repeats", type=positive_int, metavar="N", help="measured rounds (default: 3)")
    how.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="which seconds count; processor seconds hardly see what else runs on a shared machine; not with a GPU "
        "(default: %(default)s)",
    )
    how.add_argument("--seed", type=int, default=0, help="of prompts and tasks (default: 0)")
    how.add_argument("--dtype", choices=DTYPES, help="type of weights and activations (default: the checkpoint's)")
    how.add_argument("--max-model-len", type=positive_int, metavar="N", help="default: what is measured needs")
    add_engine_arg(how)
    written = parser.add_argument_group("results")
    written.add_argument(
        "--output", type=Path, metavar="FILE", help=f"write everything as JSON (--quick: {QUICK_OUTPUT})"
    )
    written.add_argument(
        "--plots", type=Path, metavar="FOLDER", help=f"draw PNGs, needs matplotlib (--quick: {QUICK_PLOTS}, if there)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.compare is not None:
        first, second = (read_results(path, "bench", SCHEMA) for path in args.compare)
        print(comparison(first, second, (str(args.compare[0]), str(args.compare[1]))))
        return 0
    note = None
    if args.quick:
        if args.model is not None:
            raise ValueError(f"--quick chooses its models; leave it out, or --model {args.model}")
        if args.guide_model is not None:
            raise ValueError(f"--quick measures without a guide; leave it out, or --guide-model {args.guide_model}")
        args.output = args.output or QUICK_OUTPUT
        if args.plots is None:
            args.plots, note = (QUICK_PLOTS, None) if can_plot() else (None, _PLOTS_NEED)
    if args.plots is not None and not can_plot():
        raise ValueError(f"--plots {args.plots}: {_PLOTS_NEED}")
    check_folder_of(args.output)
    wanted = [filled(args, preset) for preset in (QUICK if args.quick else ({},))]
    report = _measure(wanted, args.clock, shlex.join(["dllm", *args.argv]))
    print(tables(report))
    if args.output is not None:
        args.output.write_text(json_rows(report, depth=4) + "\n", encoding="utf-8")
        print(f"\nwrote {args.output}")
    if args.plots is not None:
        from dllm_engine.bench.plots import draw

        print(*(f"wrote {file}" for file in draw(report, args.plots)), sep="\n")
    if note:
        print(f"no plots: {note}")
    return 0


def filled(args: argparse.Namespace, preset: dict[str, Any]) -> argparse.Namespace:
    """The arguments, with those that were not given taken from ``preset``, else from the defaults."""
    guided = {} if args.guide_model is None else {"unmasking": f"{ONE},{GUIDED}"}
    return argparse.Namespace(**vars(args) | DEFAULTS | guided | preset | given(args, DEFAULTS))


_PLOTS_NEED = "matplotlib is not installed; run pip install 'dllm-engine[bench]'"


def _measure(wanted: list[argparse.Namespace], clock: str, command: str) -> Report:
    be_quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the instrument looks inside the engine
    check_release()
    from dllm_engine.bench.benchmark import Benchmark
    from dllm_engine.bench.machine import provenance, use_clock

    use_clock(clock)
    benchmarks = [Benchmark(settings(each)) for each in wanted]
    runs = []
    for number, benchmark in enumerate(benchmarks):
        if number:
            benchmarks[number - 1].stop()
        runs.append(benchmark.run())
    return {"schema": SCHEMA, "command": command, "machine": provenance(), "how": HOW, "runs": runs}


_SAME = ("model", "response", "block_length", "shared_prefix", "repeats", "seed", "dtype", "max_model_len")
"""Arguments that are settings of the same name."""


def settings(args: argparse.Namespace) -> "BenchSettings":
    """What the arguments ask for; raises ``ValueError`` for what cannot be measured."""
    from dllm_engine.bench.random_model import config_of
    from dllm_engine.bench.subject import BenchSettings
    from dllm_engine.families import family_of

    family = family_of(config_of(args.model))
    methods = tuple(methods_for(family.attention)) if args.methods == "all" else tuple(args.methods.split(","))
    for method in methods:
        EngineOptions.parse({"cache_method": method})
    if (block := args.block_length) is not None and block > args.response:
        raise ValueError(f"--block-length {block} is longer than --response {args.response}; lower it")
    guide, guiding = given(args, GUIDE_SETTINGS), given(args, GUIDING)
    if guiding and args.guide_model is None:
        raise ValueError(f"--{next(iter(guiding)).replace('_', '-')}: there is no guide; give --guide-model")
    asked = guiding if args.guide_model is not None else None
    return BenchSettings(
        methods=methods,
        unmaskings=tuple(_unmasking(text, asked) for text in split_names(args.unmasking)),
        batches=tuple(args.batch),
        prompts=tuple(args.prompt),
        baseline=not args.no_baseline,
        engine_args=guide | dict(args.engine_arg),
        **{name: getattr(args, name) for name in _SAME},
    )


def _unmasking(text: str, guiding: dict[str, Any] | None) -> "Unmasking":
    """``guiding``: how a guide decides, which ``guided`` asks for and other ways leave out; None: there is no guide."""
    from dllm_engine.bench.subject import Unmasking
    from dllm_engine.scheduler.unmasking import UNMASKING_POLICIES

    if text == GUIDED:
        if guiding is None:
            raise ValueError(f"unmasking rule {GUIDED!r}: there is no guide; give --guide-model")
        return Unmasking(text, {GUIDED: True, **guiding})
    options = {"unmasking": text} if text in UNMASKING_POLICIES else parse_rule(text)
    return Unmasking(text, options if guiding is None else {GUIDED: False, **options})
