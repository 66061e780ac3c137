"""Compute how many requests fit a GPU.

By arithmetic, from the model's config alone: no weights are read, no GPU is needed. Sizes are per GPU.
"""

import argparse
import json
import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter

from dllm_engine.cli.arguments import add_value, as_words, positive_int
from dllm_engine.cli.engine import add_cache_arguments, add_model, add_model_arguments, engine_options, given
from dllm_engine.memory.capacity import Deployment, RequestDemand, Sizing
from dllm_engine.memory.capacity import plan as sizing_of
from dllm_engine.memory.weights import QUANTIZATIONS
from dllm_engine.options import GUIDE_SETTINGS, EngineOptions
from dllm_engine.text import format_table, readable_size


def byte_size(text: str) -> int:
    """Bytes from ``80GiB``, ``24GB``, ``512MiB`` or a number of bytes, of a MiB at least."""
    try:
        size = TypeAdapter(ByteSize).validate_python(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a size such as 80GiB, 24GB or 512MiB") from None
    if 0 < size < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is {size} bytes; give the unit too, as in {size}GiB")
    return size


def share(text: str) -> float:
    """A number above 0, and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, at most 1")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = {field.name: f"(default: {field.default})" for field in fields(Deployment)}
    add_model(parser)
    add_value(parser, "--gpu-memory", byte_size, "SIZE", "of one GPU, such as 80GiB", dest="memory")
    add_value(parser, "--prompt", positive_int, "N", f"tokens {default['prompt']}")
    add_value(parser, "--response", positive_int, "N", f"tokens {default['response']}")
    add_value(parser, "--block-length", positive_int, "N", "tokens denoised together (default: the family's)")
    quantization = "of a checkpoint that is not here yet, 4 bits in groups of 128 (default: as the checkpoint states)"
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help=quantization)
    group = parser.add_argument_group("engine", "As for `dllm serve`; the plan ends with the command that uses them.")
    add_model_arguments(group)
    add_value(group, "--max-num-seqs", positive_int, "N", f"most requests {default['max_num_seqs']}")
    rows = f"rows of one forward pass {default['max_num_batched_tokens']}; at least --max-model-len, or a block of a "
    add_value(group, "--max-num-batched-tokens", positive_int, "N", rows + "block diffusion model")
    vllms = f"share of the GPU that vLLM may use {default['gpu_memory_utilization']}"
    add_value(group, "--gpu-memory-utilization", share, "P", vllms)
    overhead = "set aside for processes, CUDA context, libraries and communication (default: 1GiB, an assumption)"
    add_value(group, "--overhead", byte_size, "SIZE", overhead)
    add_cache_arguments(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, sizes in bytes")


def run(args: argparse.Namespace) -> int:
    if args.memory is None:
        raise ValueError("--gpu-memory is missing: the memory of one GPU, such as 80GiB")
    asked = given(args, [field.name for field in fields(Deployment)])
    sizing = sizing_of(Deployment(**asked, options=EngineOptions.parse(engine_options(args))))
    copy, command = copy_command(sizing), serve_command(sizing, args)
    if args.json:
        print(json.dumps(asdict(sizing) | {"serve": command}, indent=2, default=EngineOptions.model_dump))
    else:
        copied = [f"To make the copy: {shlex.join(copy)}"] if copy else []
        print(as_text(sizing), *copied, f"To serve it so: {shlex.join(command)}", sep="\n")
    return 0


def as_text(s: Sizing) -> str:
    """The plan as two tables: where the memory goes, and what a request takes under each cache method."""
    weights = "" if s.quantization is None else f" with {s.quantization} weights"
    canvas, gpus = s.prompt + s.response, f"{s.tensor_parallel_size} GPU{'s' * (s.tensor_parallel_size > 1)}"
    tokens = f"prompt {s.prompt} + response {s.response} = {canvas} tokens"
    taken = s.weight_bytes + s.guide_weight_bytes + s.activation_bytes + s.overhead + s.pool_bytes
    pool = f"{s.num_pages:,} pages of {readable_size(s.page_bytes)} ({s.options.page_size} tokens of one layer)"
    parts = [
        ("weights", s.weight_bytes, "upper bound" if any("quantized" in note for note in s.notes) else "exact"),
        *([("guide's weights", s.guide_weight_bytes, "exact")] if s.guide_weight_bytes else []),
        ("activations", s.activation_bytes, f"estimate, for {s.max_num_batched_tokens:,} rows"),
        ("overhead", s.overhead, "assumed (--overhead)"),
        ("left unused", s.memory - taken, f"--gpu-memory-utilization {s.gpu_memory_utilization:g}"),
        ("page pool", s.pool_bytes, pool),
    ]
    memory = [("PER GPU", "SIZE", ""), *((name, readable_size(size), note) for name, size, note in parts)]
    titles = "CACHE METHOD,TOKENS RETAINED,PAGES/REQUEST,MEMORY/REQUEST,ROWS/STEP,REQUESTS AT ONCE,LIMIT".split(",")
    rows = [_method_row(demand, canvas, chosen=demand is s.demand) for demand in (s.demand, *s.others)]
    lines = [
        f"{s.model} in {s.dtype}{weights} on {gpus} of {readable_size(s.memory)}: {tokens}",
        *("", format_table(memory), "", format_table([titles, *rows]), ""),
        *(f"Note: {note}." for note in s.notes),
        "* as asked for; the others with their papers' options. Pages are the most that a request holds; rows are",
        "  the positions computed per step, as a mean over the response at a token per step.",
        "",
    ]
    return "\n".join(lines)


def _method_row(demand: RequestDemand, canvas: int, *, chosen: bool) -> tuple[str, ...]:
    name, pages = demand.cache_method + " *" * chosen, f"{demand.pages:,}"
    if not demand.requests:
        return (name, "–", pages if demand.pages else "–", "–", "–", "0", demand.limit)
    sizes = f"{demand.tokens_retained:,} of {canvas:,}", pages, readable_size(demand.bytes)
    return (name, *sizes, f"{demand.rows_per_step:,.0f}", f"{demand.requests:,}", demand.limit)


def copy_command(s: Sizing) -> list[str]:
    """The command that writes the quantized copy of the plan's model; empty if there is none to write."""
    if s.quantization in (None, "fp8"):  # made at load time
        return []
    group = QUANTIZATIONS[s.quantization].group_size
    scheme = ["--scheme", s.quantization, *(["--group-size", str(group)] if group else [])]
    return ["python", "examples/quantize.py", s.model, f"{Path(s.model).name}-{s.quantization}", *scheme]


def serve_command(s: Sizing, args: argparse.Namespace) -> list[str]:
    """The command line of a server with the plan's settings."""
    copy = copy_command(s)
    options: dict[str, Any] = {} if s.options.cache_method == "none" else {"cache_method": s.options.cache_method}
    settled = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
    options |= {"cache_options": dict(args.cache_option), **{name: getattr(s, name) for name in settled}}
    options |= given(args, ("tensor_parallel_size", "dtype", "page_size", *GUIDE_SETTINGS))
    if s.quantization == "fp8":
        options["quantization"] = "fp8_per_channel"
    return ["dllm", "serve", copy[3] if copy else s.model, *as_words(options)]
