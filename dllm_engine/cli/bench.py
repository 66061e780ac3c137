"""Measure speed and memory of the cache methods.

Measures every cache method with every way of unmasking, batch and prompt length,
several times each, one engine after the other. Prompts are random tokens, and end
tokens are ignored: `dllm eval` measures the speed on tasks. The model is a checkpoint,
or random weights of a shape such as ``llada-8b``, or ``llada-8b/4`` with a quarter of
width, heads, layers and vocabulary.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

from dllm_engine.checkpoints import is_named_shape, load_config
from dllm_engine.cli.arguments import (
    add_value,
    positive_int,
    positive_ints,
    whole_number,
)
from dllm_engine.cli.engine import given, load
from dllm_engine.cli.evaluate import (
    add_comparison_arguments,
    combinations,
    finish,
    subject_of,
)
from dllm_engine.evaluation.bench import COLUMNS, Workload, random_engine, values_of
from dllm_engine.evaluation.comparison import Comparison, table
from dllm_engine.memory import canvas_limit

DEFAULTS: dict[str, Any] = {
    "batch": [1, 8],
    "prompt": [128, 512],
    "gen_length": 64,
    "unmasking_rules": "one",
}
QUICK: dict[str, Any] = {
    "batch": [1, 4],
    "prompt": [64],
    "gen_length": 32,
    "unmasking_rules": "one,tokens_per_step=4",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a first look: short prompts and responses, small batches",
    )
    add_value(
        parser,
        "--batch --batch-size",
        positive_ints,
        "N,…",
        "requests at once (default: 1,8)",
    )
    add_value(
        parser,
        "--prompt --input-len",
        positive_ints,
        "N,…",
        "prompt tokens (default: 128,512)",
    )
    add_value(parser, "--repeats", positive_int, "N", "measured rounds", default=3)
    add_value(parser, "--output", Path, "FILE.json", "write each row as it is measured")
    add_comparison_arguments(parser)
    add_value(
        parser,
        "--unmasking",
        str,
        "RULE,…",
        "as --unmasking-rules",
        dest="unmasking_rules",
    )
    add_value(
        parser,
        "--response --output-len",
        whole_number,
        "N",
        "as --gen-length",
        dest="gen_length",
    )
    parser.set_defaults(methods="all", seed=0)


def run(args: argparse.Namespace) -> int:
    preset = QUICK if args.quick else DEFAULTS
    vars(args).update(preset | given(args, preset))
    longest = max(args.prompt), args.gen_length, args.block_length, args.max_model_len
    args.max_model_len = canvas_limit(load_config(args.model), *longest)
    args.engine_arg = [
        ("max_num_batched_tokens", max(args.batch) * args.max_model_len),
        *args.engine_arg,
    ]
    workloads = [
        Workload(f"{batch} × {prompt}", batch, prompt, args.repeats, args.seed)
        for prompt, batch in itertools.product(args.prompt, args.batch)
    ]
    start = (
        (lambda arguments: random_engine(**arguments))
        if is_named_shape(args.model)
        else load
    )
    with Comparison(args.output, args.command, subject_of(args), start) as comparison:
        comparison.add(combinations(args, max(args.batch)), workloads)
        try:
            comparison.run()
        finally:
            comparison.stop()
            if comparison.scored:
                from dllm_engine.evaluation.hardware import machine_line, provenance

                print(
                    machine_line(provenance()),
                    table(values_of(comparison.scored), COLUMNS),
                    sep="\n\n",
                )
                finish(args, comparison)
    return 1 if comparison.errors else 0
