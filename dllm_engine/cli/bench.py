"""Measure speed and memory of the cache methods.

Measures every cache method with every way of unmasking, batch and prompt length, several times each, one engine after
the other. Tokens count up to the end token of a response, prompts never. The model is a checkpoint, or random weights
of a shape such as ``llada-8b``, or ``llada-8b/4`` with a quarter of width, heads, layers and vocabulary.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_engine.checkpoints import is_named_shape, load_config, named_shape
from dllm_engine.cli.arguments import GUIDED, ONE, RULES, add_options, add_value, positive_int, positive_ints
from dllm_engine.cli.engine import add_decoding_arguments, add_engine_arguments, given, load
from dllm_engine.cli.evaluate import add_comparison_arguments, combinations
from dllm_engine.evaluation.bench import COLUMNS, Workload, comparison, measure, random_engine
from dllm_engine.evaluation.comparison import table
from dllm_engine.evaluation.result_file import SCHEMA, check_folder_of, read_results
from dllm_engine.memory.capacity import canvas_limit
from dllm_engine.options import GUIDE_SETTINGS, EngineOptions
from dllm_engine.text import json_rows

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

DEFAULTS: dict[str, Any] = {"batch": [1, 8], "prompt": [128, 512], "gen_length": 64}
QUICK: dict[str, Any] = {"batch": [1, 4], "prompt": [64], "gen_length": 32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a first look: short prompts and responses, small batches")
    add_value(parser, "--compare", Path, "FILE", "measure nothing; print ratios of two result files", nargs=2)
    add_value(parser, "--batch --batch-size", positive_ints, "N,…", "requests at once (default: 1,8)")
    add_value(parser, "--prompt --input-len", positive_ints, "N,…", "prompt tokens (default: 128,512)")
    add_value(parser, "--repeats", positive_int, "N", "measured rounds (default: %(default)s)", default=3)
    add_value(parser, "--output", Path, "FILE", "write everything as JSON")
    add_decoding_arguments(parser, "--response --output-len")
    add_comparison_arguments(parser, "--unmasking")  # takes the name of a policy too
    add_engine_arguments(parser)
    add_options(parser.add_argument_group("guide"), EngineOptions, GUIDE_SETTINGS)
    parser.set_defaults(methods="all", unmasking=None, seed=0, cache_method="none", cache_option=[])


def run(args: argparse.Namespace) -> int:
    if args.compare is not None:
        first, second = (read_results(path, "bench") for path in args.compare)
        print(comparison(first, second, args.compare))
        return 0
    for name, value in (QUICK if args.quick else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.unmasking_rules is None and not given(args, RULES):
        more = [GUIDED] if args.guide_model is not None else ["threshold=0.9"] if args.quick else []
        args.unmasking_rules = ",".join([ONE, *more])
    check_folder_of(args.output)
    if args.guide_model is not None and is_named_shape(args.model):
        raise ValueError(f"model {args.model!r} has random weights, which agree with no guide; leave out --guide-model")
    longest = max(args.prompt), args.gen_length, args.block_length, args.max_model_len
    args.max_model_len = canvas_limit(load_config(args.model), *longest)
    args.engine_arg = [("max_num_batched_tokens", max(args.batch) * args.max_model_len), *args.engine_arg]
    workload = Workload(args.batch, args.prompt, args.repeats, args.seed)
    errors: dict[str, str] = {}
    cells = measure(combinations(args, max(args.batch)), workload, _load, errors)
    from dllm_engine.evaluation.hardware import machine_line, provenance

    machine = provenance()
    print(machine_line(machine), table(cells, COLUMNS), sep="\n\n")
    for name, why in errors.items():
        print(f"cannot be measured: {name}: {why}", file=sys.stderr)
    if args.output is not None:
        settings = {name: value for name, value in vars(args).items() if name not in ("argv", "output", "run")}
        report = {"schema": SCHEMA, "of": "bench", "command": shlex.join(["dllm", *args.argv]), "machine": machine}
        args.output.write_text(json_rows(report | {"settings": settings, "cells": cells}, depth=2) + "\n", "utf-8")
        print(f"\nwrote {args.output}")
    return 1 if errors else 0


def _load(arguments: dict[str, Any]) -> "LLM":
    model = arguments["model"]
    if not is_named_shape(model):
        return load(arguments)
    return random_engine(named_shape(model), **{name: value for name, value in arguments.items() if name != "model"})
