"""``dllm bench``: speed and memory of the cache methods."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_engine.checkpoints import NAMED_SHAPES, is_named_shape, load_config, named_shape
from dllm_engine.cli.arguments import GUIDED, ONE, RULES, add_options, add_value, positive_int, positive_ints
from dllm_engine.cli.engine import add_decoding_arguments, add_engine_arguments, given, load
from dllm_engine.cli.evaluate import add_comparison_arguments, combinations
from dllm_engine.evaluation.bench import COLUMNS, Workload, comparison, measure, random_engine
from dllm_engine.evaluation.comparison import table
from dllm_engine.evaluation.result_file import SCHEMA, check_folder_of, read_results
from dllm_engine.families import family_of
from dllm_engine.options import GUIDE_SETTINGS, EngineOptions
from dllm_engine.text import json_rows

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

DEFAULTS: dict[str, Any] = {"batch": [1, 8], "prompt": [128, 512], "gen_length": 64}
QUICK: dict[str, Any] = {"batch": [1, 4], "prompt": [64], "gen_length": 32}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed and memory of the cache methods",
        description="Measures every cache method with every way of unmasking, batch and prompt length, several times "
        "each, one engine after the other. Tokens count up to the end token of a response, prompts never. The model is "
        f"a checkpoint, or random weights of a shape: {', '.join(NAMED_SHAPES)}, or `llada-8b/4` with a quarter of "
        "width, heads, layers and vocabulary.",
        conflict_handler="resolve",
    )
    parser.add_argument("--quick", action="store_true", help="a first look: short prompts and responses, small batches")
    add_value(parser, "--compare", Path, "FILE", "measure nothing; print ratios of two result files", nargs=2)
    add_value(parser, "--batch --batch-size", positive_ints, "N,…", "requests at once (default: 1,8)")
    add_value(parser, "--prompt --input-len", positive_ints, "N,…", "prompt tokens (default: 128,512)")
    add_value(parser, "--repeats", positive_int, "N", "measured rounds (default: %(default)s)", default=3)
    add_value(parser, "--output", Path, "FILE", "write everything as JSON")
    add_decoding_arguments(parser)
    lengths = "--response --output-len --gen-length"
    add_value(parser, lengths, positive_int, "N", "response tokens (default: 64)", dest="gen_length")
    add_comparison_arguments(parser, "--unmasking")
    add_engine_arguments(parser, with_cache=False)
    add_options(parser.add_argument_group("guide"), EngineOptions, GUIDE_SETTINGS)
    parser.set_defaults(run=run, methods="all", unmasking=None, seed=0)


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
    _check(args)
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


def _check(args: argparse.Namespace) -> None:
    """Refuse lengths that exclude each other, and fill in the sizes that hold the largest batch."""
    if (block := args.block_length) is not None and block > args.gen_length:
        raise ValueError(f"--block-length {block} is longer than --response {args.gen_length}; lower it")
    if args.guide_model is not None and is_named_shape(args.model):
        raise ValueError(f"model {args.model!r} has random weights, which agree with no guide; leave out --guide-model")
    config = load_config(args.model)
    # Where attention goes by blocks, the last block of a response may end behind it.
    family_block = family_of(config).attention_block
    whole = (args.block_length or family_block) if family_block else 1
    longest = max(args.prompt) + args.gen_length
    args.max_model_len = args.max_model_len or -(-longest // whole) * whole
    if args.max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"prompt and response of {longest} tokens: {args.model} has {config.max_position_embeddings} positions; "
            f"lower --prompt or --response"
        )
    tokens = max(args.batch) * args.max_model_len
    args.engine_arg = [("max_num_batched_tokens", tokens), *args.engine_arg]


def _load(arguments: dict[str, Any]) -> "LLM":
    model = arguments["model"]
    if not is_named_shape(model):
        return load(arguments)
    return random_engine(named_shape(model), **{name: value for name, value in arguments.items() if name != "model"})
