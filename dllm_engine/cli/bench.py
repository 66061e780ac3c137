"""Measure speed and memory of the cache methods.

Measures every cache method with every way of unmasking, batch and prompt length,
several times each, one engine after the other. Prompts are random tokens, and end
tokens are ignored: `dllm eval` measures the speed on tasks. The model is a checkpoint,
or random weights of a shape such as ``llada-8b``, or ``llada-8b/4`` with a quarter of
width, heads, layers and vocabulary.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.checkpoints import is_named_shape, load_config
from dllm_engine.cli.arguments import (
    add_value,
    positive_int,
    positive_ints,
    whole_number,
)
from dllm_engine.cli.engine import chosen_arguments, load
from dllm_engine.cli.evaluate import (
    add_comparison_arguments,
    combinations,
    finish,
    subject_of,
)
from dllm_engine.evaluation.bench import (
    COLUMNS,
    Chats,
    SecondRequest,
    Workload,
    random_engine,
    values_of,
)
from dllm_engine.evaluation.comparison import Combination, Comparison, table
from dllm_engine.memory import canvas_limit

DEFAULTS: dict[str, Any] = {
    "batch": [1, 8],
    "prompt": [128, 512],
    "gen_length": 64,
    "unmasking_rules": "one",
}
NUM_CHATS, TURNS = 64, 3
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
    add_value(
        parser,
        "--shared-prompt",
        positive_int,
        "N",
        "instead of --batch: the second of two requests whose prompts share N tokens, "
        "and 64 chats of three turns, with and without shared pages",
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
    vars(args).update(preset | chosen_arguments(args, preset))
    workloads: list[Workload] = [
        Workload(f"{batch} × {prompt}", batch, prompt, args.repeats, args.seed)
        for prompt, batch in itertools.product(args.prompt, args.batch)
    ]
    longest, columns = max(args.prompt), COLUMNS
    if args.shared_prompt is not None:
        workloads = shared_workloads(args)
        longest += (TURNS - 1) * (longest - args.shared_prompt + args.gen_length)
        columns = {"WORKLOAD": ("task", "")} | COLUMNS
    at_once = max(workload.batch for workload in workloads)
    lengths = longest, args.gen_length, args.block_length, args.max_model_len
    args.max_model_len = canvas_limit(load_config(args.model), *lengths)
    args.engine_arg = [
        ("max_num_batched_tokens", at_once * args.max_model_len),
        *args.engine_arg,
    ]
    combined = combinations(args, at_once)
    if args.shared_prompt is not None:
        combined = with_and_without_sharing(args, combined)
    start = (
        (lambda arguments: random_engine(**arguments))
        if is_named_shape(args.model)
        else load
    )
    with Comparison(args.output, args.command, subject_of(args), start) as comparison:
        comparison.add(combined, workloads)
        try:
            comparison.run()
        finally:
            comparison.stop()
            if comparison.scored:
                from dllm_engine.evaluation.hardware import machine_line, provenance

                print(
                    machine_line(provenance()),
                    table(values_of(comparison.scored), columns),
                    sep="\n\n",
                )
                finish(args, comparison)
    return 1 if comparison.errors else 0


def shared_workloads(args: argparse.Namespace) -> list[Workload]:
    """Workloads with shared prompts, for each length: the second of two requests, and
    chats.
    """
    shared = args.shared_prompt
    workloads: list[Workload] = []
    if shared >= min(args.prompt):
        raise ValueError(
            f"--shared-prompt {shared} is out of range: give less than the prompt has "
            f"({min(args.prompt)}, --prompt)"
        )
    for prompt in args.prompt:
        about = prompt, args.repeats, args.seed, shared
        second = f"2nd of 2, {shared} of {prompt} shared"
        chats = f"{NUM_CHATS} chats of {TURNS} turns, {prompt - shared} tokens each"
        workloads.append(SecondRequest(second, 2, *about))
        workloads.append(Chats(chats, NUM_CHATS, *about, TURNS))
    return workloads


def with_and_without_sharing(
    args: argparse.Namespace, combined: Sequence[Combination]
) -> list[Combination]:
    """Each combination without shared pages, and with them if the method supports it."""
    by_blocks = load_config(args.model).family.attention_block is not None
    shares = {"share_prompts": True} if not by_blocks else {}
    without = {"share_prompts": False, "anchor_tokens": 0}
    rows = []
    for combination in combined:
        method = CACHE_METHODS[combination.engine["cache_method"]]
        plain = combination.engine | without | {"enable_prefix_caching": False}
        rows.append(replace(combination, engine=plain))
        if method.keeps_for_good if by_blocks else method.shares_prompts:
            label = f"{combination.method} shared"
            engine = combination.engine | shares
            rows.append(replace(combination, method=label, engine=engine))
    return rows
