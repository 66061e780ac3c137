"""Compute how many requests fit a GPU, or what a CPU needs.

By arithmetic, from the model's config alone: no weights are read, no GPU is needed.
Sizes are per GPU; without ``--gpu-memory`` they are those of a CPU.
"""

import argparse
import json
import shlex
from typing import Any

from pydantic import ValidationError

from dllm_engine.cli.arguments import add_options, as_words
from dllm_engine.cli.engine import (
    add_cache_arguments,
    add_model,
    add_model_arguments,
    chosen_arguments,
    engine_options,
)
from dllm_engine.memory import Deployment, RequestDemand, Sizing, plan
from dllm_engine.model_name import own_name
from dllm_engine.options import GUIDE_SETTINGS
from dllm_engine.text import explain, format_table, readable_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_options(
        parser,
        Deployment,
        ("gpu_memory", "prompt", "response", "block_length", "quantization"),
    )
    group = parser.add_argument_group(
        "engine", "As for `dllm serve`; the plan ends with the command that uses them."
    )
    add_model_arguments(group)
    add_options(
        group,
        Deployment,
        (
            "max_num_seqs",
            "max_num_batched_tokens",
            "gpu_memory_utilization",
            "overhead",
        ),
    )
    add_cache_arguments(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, sizes in bytes")


def run(args: argparse.Namespace) -> int:
    settings = chosen_arguments(args, Deployment.model_fields) | {
        "options": engine_options(args)
    }
    try:
        deployment = Deployment(**settings)
    except ValidationError as error:
        raise ValueError(explain(error, "argument")) from None
    sizing = plan(deployment)
    command = serve_command(sizing, args)
    if args.json:
        print(json.dumps(sizing.model_dump(mode="json") | {"serve": command}, indent=2))
    else:
        print(as_text(sizing), f"To serve it so: {shlex.join(command)}", sep="\n")
    return 0


def as_text(s: Sizing) -> str:
    """The plan as two tables: the use of memory, and the needs of a request under each
    cache method.
    """
    weights = "" if s.quantization is None else f" with {s.quantization} weights"
    canvas, tp = s.prompt + s.response, s.tensor_parallel_size
    parts = [
        (
            "weights",
            s.weight_bytes,
            "upper bound" if any("quantized" in note for note in s.notes) else "exact",
        ),
        *(
            [("guide's weights", s.guide_weight_bytes, "exact")]
            if s.guide_weight_bytes
            else []
        ),
        (
            "activations",
            s.activation_bytes,
            f"estimate, for {s.max_num_batched_tokens:,} rows",
        ),
        ("overhead", s.overhead, "assumed (--overhead)"),
    ]
    note = (
        f"{s.num_pages:,} pages of {readable_size(s.page_bytes)} "
        f"({s.options.page_size} tokens of one layer)"
    )
    pool = ("page pool", s.pool_bytes, note)
    if s.gpu_memory is None:
        per, machine = "MEMORY", "a CPU" if tp == 1 else f"{tp} processes of a CPU"
        parts += [pool, ("together", s.num_bytes, "what a server needs")]
    else:
        per = "PER GPU"
        machine = f"{tp} GPU{'s' * (tp > 1)} of {readable_size(s.gpu_memory)}"
        share = f"--gpu-memory-utilization {s.gpu_memory_utilization:g}"
        parts += [("left unused", s.gpu_memory - s.num_bytes, share), pool]
    memory = [
        (per, "SIZE", ""),
        *((name, readable_size(size), note) for name, size, note in parts),
    ]
    titles = "CACHE METHOD,TOKENS RETAINED,PAGES/REQUEST,MEMORY/REQUEST,ROWS/STEP,REQUESTS AT ONCE,LIMIT".split(
        ","
    )
    rows = [
        _method_row(demand, canvas, chosen=demand is s.demand)
        for demand in (s.demand, *s.others)
    ]
    lines = [
        f"{s.model} in {s.dtype}{weights} on {machine}: prompt {s.prompt} + response "
        f"{s.response} = {canvas} tokens",
        "",
        format_table(memory),
        "",
        format_table([titles, *rows]),
        "",
        *(f"Note: {note}." for note in s.notes),
        "* as asked for; the others with their papers' options. Pages are the most "
        "that a request holds; rows are",
        "  the positions computed per step, as a mean over the response at a token per "
        "step.",
        "",
    ]
    return "\n".join(lines)


def _method_row(demand: RequestDemand, canvas: int, *, chosen: bool) -> tuple[str, ...]:
    name = demand.cache_method + " *" * chosen
    pages = f"{demand.pages:,}"
    if not demand.requests:
        return (name, "–", pages if demand.pages else "–", "–", "–", "0", demand.limit)
    sizes = (
        f"{demand.tokens_retained:,} of {canvas:,}",
        pages,
        readable_size(demand.bytes),
    )
    return (
        name,
        *sizes,
        f"{demand.rows_per_step:,.0f}",
        f"{demand.requests:,}",
        demand.limit,
    )


def serve_command(s: Sizing, args: argparse.Namespace) -> list[str]:
    """The command line of a server with the plan's settings."""
    options: dict[str, Any] = (
        {}
        if s.options.cache_method == "none"
        else {"cache_method": s.options.cache_method}
    )
    sizes = ["max_model_len", "max_num_seqs", "max_num_batched_tokens"]
    if s.gpu_memory is not None:
        sizes.append("gpu_memory_utilization")
    options |= {
        "cache_options": dict(args.cache_option),
        **{name: getattr(s, name) for name in sizes},
    }
    options |= chosen_arguments(
        args,
        ("tensor_parallel_size", "dtype", "page_size", "block_length", *GUIDE_SETTINGS),
    )
    if s.quantization == "fp8":
        options["quantization"] = (
            "fp8_per_channel"  # made at load time; others need a copy
        )
    model = (
        s.model
        if s.quantization in (None, "fp8")
        else f"{own_name(s.model)}-{s.quantization}"
    )
    return ["dllm", "serve", model, *as_words(options)]
