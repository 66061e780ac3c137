"""``dllm plan``: what fits a GPU, from the model's config alone."""

import argparse
import json
import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize, TypeAdapter

from dllm_engine.cli.arguments import as_words, positive_int
from dllm_engine.cli.engine import add_cache_arguments, add_model, add_model_arguments, engine_options, given
from dllm_engine.memory.weights import QUANTIZATIONS
from dllm_engine.options import GUIDE_SETTINGS, EngineOptions
from dllm_engine.text import format_table, readable_size

if TYPE_CHECKING:
    from dllm_engine.memory.capacity import RequestDemand, Sizing


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


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="how many requests fit a GPU, by arithmetic",
        description="From the model's config alone: no weights are read, no GPU is needed. Sizes are per GPU.",
    )
    add_model(parser)
    parser.add_argument("--gpu-memory", type=byte_size, metavar="SIZE", help="of one GPU, such as 80GiB")
    parser.add_argument("--prompt", type=positive_int, default=1024, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--response", type=positive_int, default=256, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument(
        "--block-length", type=positive_int, metavar="N", help="tokens denoised together (default: the family's)"
    )
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="of a checkpoint that is not here yet, 4 bits in groups of 128 (default: as the checkpoint states)",
    )
    group = parser.add_argument_group("engine", "As for `dllm serve`; the plan ends with the command that uses them.")
    add_model_arguments(group)
    group.add_argument(
        "--max-num-seqs", type=positive_int, default=256, metavar="N", help="most requests (default: %(default)s)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive_int,
        default=8192,
        metavar="N",
        help="rows of one forward pass (default: %(default)s; at least --max-model-len, or a block of a block "
        "diffusion model)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=share,
        default=0.92,
        metavar="P",
        help="share of the GPU that vLLM may use (default: %(default)s)",
    )
    group.add_argument(
        "--overhead",
        type=byte_size,
        default=1 << 30,
        metavar="SIZE",
        help="set aside for processes, CUDA context, libraries and communication (default: 1GiB, an assumption)",
    )
    add_cache_arguments(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, sizes in bytes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from dllm_engine.memory.capacity import Deployment, plan

    if args.gpu_memory is None:
        raise ValueError("--gpu-memory is missing: the memory of one GPU, such as 80GiB")
    # Its other fields are arguments of the same names.
    asked = {field.name: getattr(args, field.name) for field in fields(Deployment) if hasattr(args, field.name)}
    options = EngineOptions.parse(engine_options(args))
    sizing = plan(Deployment(**asked, memory=args.gpu_memory, options=options))
    command = serve_command(sizing, args)
    print(json.dumps(asdict(sizing) | {"serve": command}, indent=2) if args.json else as_text(sizing, args, command))
    return 0


def as_text(s: "Sizing", args: argparse.Namespace, command: list[str]) -> str:
    """The plan as two tables: where the memory goes, and what a request takes under each cache method."""
    weights = "" if args.quantization is None else f" with {args.quantization} weights"
    tokens = f"prompt {args.prompt} + response {args.response} = {s.canvas} tokens"
    gpus = f"{s.tensor_parallel_size} GPU{'s' * (s.tensor_parallel_size > 1)}"
    head = f"{s.model} in {s.dtype}{weights} on {gpus} of {readable_size(s.memory)}: {tokens}"
    taken = s.weight_bytes + s.guide_weight_bytes + s.activation_bytes + s.overhead + s.pool_bytes
    parts = [
        ("weights", s.weight_bytes, "upper bound" if any("quantized" in note for note in s.notes) else "exact"),
        *([("guide's weights", s.guide_weight_bytes, "exact")] if args.guide_model is not None else []),
        ("activations", s.activation_bytes, f"estimate, for {s.max_num_batched_tokens:,} rows"),
        ("overhead", s.overhead, "assumed (--overhead)"),
        ("left unused", s.memory - taken, f"--gpu-memory-utilization {args.gpu_memory_utilization:g}"),
        (
            "page pool",
            s.pool_bytes,
            f"{s.num_pages:,} pages of {readable_size(s.page_bytes)} ({s.page_size} tokens of one layer)",
        ),
    ]
    memory = [("PER GPU", "SIZE", ""), *((name, readable_size(size), note) for name, size, note in parts)]
    rows: list[tuple[str, ...]] = [
        ("CACHE METHOD", "TOKENS RETAINED", "PAGES/REQUEST", "MEMORY/REQUEST", "ROWS/STEP", "REQUESTS AT ONCE", "LIMIT")
    ]
    rows += [_method_row(demand, s.canvas, chosen=demand is s.demand) for demand in (s.demand, *s.others)]
    lines = [
        *(head, "", format_table(memory), "", format_table(rows), ""),
        *(f"Note: {note}." for note in s.notes),
        "* as asked for; the others with their papers' options. Pages are the most that a request holds; rows are",
        "  the positions computed per step, as a mean over the response at a token per step.",
        "",
        *(f"To make the copy: {shlex.join(copy)}" for copy in filter(None, [copy_command(args)])),
        f"To serve it so: {shlex.join(command)}",
    ]
    return "\n".join(lines)


def _method_row(demand: "RequestDemand", canvas: int, *, chosen: bool) -> tuple[str, ...]:
    name = demand.cache_method + (" *" if chosen else "")
    if not demand.requests:
        return (name, "–", f"{demand.pages:,}" if demand.pages else "–", "–", "–", "0", demand.limit)
    return (
        name,
        f"{demand.tokens_retained:,} of {canvas:,}",
        f"{demand.pages:,}",
        readable_size(demand.bytes),
        f"{demand.rows_per_step:,.0f}",
        f"{demand.requests:,}",
        demand.limit,
    )


def copy_command(args: argparse.Namespace) -> list[str]:
    """The command that writes the quantized copy of the plan's model; empty if there is none to write, or if the
    tools of its format write it."""
    if args.quantization in (None, "fp8", "gptq", "awq"):  # FP8 is made at load time
        return []
    group = QUANTIZATIONS[args.quantization].group_size
    scheme = ["--scheme", args.quantization, *(["--group-size", str(group)] if group else [])]
    return ["python", "examples/quantize.py", args.model, _copy_of(args), *scheme]


def _copy_of(args: argparse.Namespace) -> str:
    return f"{Path(args.model).name}-{args.quantization}"


def serve_command(sizing: "Sizing", args: argparse.Namespace) -> list[str]:
    """The command line of a server with the plan's settings."""
    s = sizing
    options: dict[str, Any] = {} if s.demand.cache_method == "none" else {"cache_method": s.demand.cache_method}
    options |= {"cache_options": dict(args.cache_option), **given(args, ("retention_ratio",))}
    options |= {
        "max_model_len": s.max_model_len,
        "max_num_seqs": s.max_num_seqs,
        "max_num_batched_tokens": s.max_num_batched_tokens,
        "gpu_memory_utilization": args.gpu_memory_utilization,
    }
    if s.tensor_parallel_size > 1:
        options["tensor_parallel_size"] = s.tensor_parallel_size
    if args.dtype != "auto":
        options["dtype"] = args.dtype
    if args.quantization == "fp8":
        options["quantization"] = "fp8_per_channel"
    if s.page_size != EngineOptions().page_size:
        options["page_size"] = s.page_size
    model = s.model if args.quantization in (None, "fp8") else _copy_of(args)
    return ["dllm", "serve", model, *as_words(options | given(args, GUIDE_SETTINGS))]
