"""``dllm plan``: what fits a GPU or a machine without one, and what a GPU's steps would take, from the model's config
alone."""

import argparse
import json
import shlex
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize, TypeAdapter

from dllm_engine.cli.arguments import as_words, positive_int, positive_ints
from dllm_engine.cli.engine import add_cache_arguments, add_model, add_model_arguments, engine_options, given
from dllm_engine.memory.weights import QUANTIZATIONS
from dllm_engine.options import GUIDE_SETTINGS, EngineOptions
from dllm_engine.quiet import be_quiet
from dllm_engine.speed.gpus import GPUS
from dllm_engine.text import format_table, readable_size

if TYPE_CHECKING:
    from dllm_engine.memory.needs import MemoryNeeds
    from dllm_engine.memory.plan import RequestDemand, Sizing
    from dllm_engine.speed.prediction import Prediction, Times


PAGES_GROW = """\
  Pages come as blocks come: with the {demand.admission_pages:,} of its prompt and first block a request is admitted,
  up to {demand.admitted:,} at once. {demand.requests:,} of them fit at full length; beyond that the newest ones are \
preempted."""


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
        help="how many requests fit a GPU or a CPU's memory, or how long steps would take on a GPU, by arithmetic",
        description="From the model's config alone: no weights are read, no GPU is needed. Sizes are per GPU, and on a "
        "CPU of all ranks.",
    )
    add_model(parser)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="what computes (default: %(default)s)")
    parser.add_argument("--gpu-memory", type=byte_size, metavar="SIZE", help="of one GPU, such as 80GiB")
    parser.add_argument("--memory", type=byte_size, metavar="SIZE", help="for --device cpu (default: this machine's)")
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
    speed = parser.add_argument_group("speed")
    speed.add_argument("--speed", action="store_true", help="predict step times and tokens/s instead of sizes")
    speed.add_argument("--gpu", type=str.upper, choices=GPUS, metavar="NAME", help=f"for --speed: {', '.join(GPUS)}")
    speed.add_argument(
        "--batch", type=positive_ints, default=[1, 8, 64], metavar="N,…", help="requests at once (default: 1,8,64)"
    )
    speed.add_argument(
        "--steps", type=positive_int, metavar="N", help="denoising steps of a response (default: one per token)"
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
        "--kv-cache-memory-bytes",
        type=byte_size,
        metavar="SIZE",
        help="for --device cpu: for pages of each rank (default: 1GiB)",
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
    options = EngineOptions.parse(engine_options(args))
    from dllm_engine.memory.deployment import CPU_PAGE_POOL_BYTES, Deployment
    from dllm_engine.memory.machine import machine_memory
    from dllm_engine.memory.needs import plan_on_cpu
    from dllm_engine.memory.plan import plan, plan_others

    on_cpu = args.device == "cpu"
    for name in ("gpu_memory",) if on_cpu else ("memory", "kv_cache_memory_bytes"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} does not go with --device {args.device}")
    if on_cpu and args.speed:
        raise ValueError("--speed predicts steps of GPUs; on a CPU, `dllm bench` measures them")
    if not on_cpu and args.gpu_memory is None and not args.speed:
        raise ValueError("--gpu-memory is missing: the memory of one GPU, such as 80GiB")
    # Its other fields are arguments of the same names.
    ours = ("options", "memory", "page_pool")
    asked = {field.name: getattr(args, field.name) for field in fields(Deployment) if field.name not in ours}
    if args.speed:
        if args.gpu is None:
            raise ValueError(f"--speed needs --gpu, one of {', '.join(GPUS)}")
        be_quiet()
        from dllm_engine.speed.prediction import predict

        prediction = predict(Deployment(**asked, memory=0, options=options), args.gpu, args.batch, args.steps)
        print(json.dumps(asdict(prediction), indent=2) if args.json else speed_as_text(prediction))
        return 0
    needs = None
    if on_cpu:
        pool = args.kv_cache_memory_bytes or CPU_PAGE_POOL_BYTES
        memory = args.memory or machine_memory().total
        deployment = Deployment(**asked, memory=memory, page_pool=pool, options=options)
        sizing, needs = plan_on_cpu(deployment)
    else:
        deployment = Deployment(**asked, memory=args.gpu_memory, options=options)
        sizing = plan(deployment)
    others, command = plan_others(deployment), serve_command(sizing, args)
    if args.json:
        further = {} if needs is None else {"needs": asdict(needs) | {"total": needs.total}}
        whole = asdict(sizing) | further | {"others": [asdict(other) for other in others], "serve": command}
        print(json.dumps(whole, indent=2))
    else:
        print(as_text(sizing, needs, others, args, command))
    return 0


def where_memory_goes(s: "Sizing", needs: "MemoryNeeds | None", args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Of each GPU; with ``needs``, of a machine without one."""
    weights = "upper bound" if any("quantized" in note for note in s.notes) else "exact"
    activations = f"estimate, for {s.max_num_batched_tokens:,} rows"
    pages = f"{s.num_pages:,} pages of {readable_size(s.page_bytes)} ({s.page_size} tokens of one layer)"
    if (n := needs) is not None:
        head = "ALL RANKS"
        parts = [
            ("weights", n.weights, weights),
            ("packed head", n.tied or None, "beside the tied embeddings"),
            ("packed copies", n.packed, "while loading only"),
            ("activations", n.activations, activations),
            ("overhead", n.overhead, "assumed (--overhead)"),
            ("page pool", n.pages or None, pages),
            ("peak", n.total, "packed copies, or activations and pages"),
            ("left", s.memory - n.total, "for the system and other programs"),
        ]
    else:
        head = "PER GPU"
        taken = s.weight_bytes + s.guide_weight_bytes + s.activation_bytes + s.overhead + s.pool_bytes
        parts = [
            ("weights", s.weight_bytes, weights),
            ("guide's weights", s.guide_weight_bytes if args.guide_model is not None else None, "exact"),
            ("activations", s.activation_bytes, activations),
            ("overhead", s.overhead, "assumed (--overhead)"),
            ("left unused", s.memory - taken, f"--gpu-memory-utilization {args.gpu_memory_utilization:g}"),
            ("page pool", s.pool_bytes, pages),
        ]
    shown = [(name, readable_size(size), note) for name, size, note in parts if size is not None]
    return [(head, "SIZE", ""), *shown]


def as_text(
    sizing: "Sizing",
    needs: "MemoryNeeds | None",
    others: list["RequestDemand"],
    args: argparse.Namespace,
    command: list[str],
) -> str:
    """The plan as two tables: where the memory goes, and what a request takes under each cache method."""
    s = sizing
    weights = "" if args.quantization is None else f" with {args.quantization} weights"
    tokens = f"prompt {args.prompt} + response {args.response} = {s.canvas} tokens"
    where = f"{s.tensor_parallel_size} GPU{'s' * (s.tensor_parallel_size > 1)} of" if needs is None else "a CPU with"
    head = f"{s.model} in {s.dtype}{weights} on {where} {readable_size(s.memory)}: {tokens}"
    rows: list[tuple[str, ...]] = [
        ("CACHE METHOD", "TOKENS RETAINED", "PAGES/REQUEST", "MEMORY/REQUEST", "ROWS/STEP", "REQUESTS AT ONCE", "LIMIT")
    ]
    rows += [_method_row(demand, s.canvas, chosen=demand is s.demand) for demand in (s.demand, *others)]
    lines = [head, "", format_table(where_memory_goes(s, needs, args)), "", format_table(rows), ""]
    lines += [f"Note: {note}." for note in s.notes]
    grows = s.demand.admission_pages < s.demand.pages
    pages = "the most that a request holds" if grows else "those reserved for a request at admission"
    lines += [
        f"* as asked for; the others with their papers' options. Pages are {pages};",
        "  rows are the positions computed per step, as a mean over the response at a token per step.",
        *(PAGES_GROW.format(demand=s.demand).splitlines() if grows else []),
        *([f"  Of the pages, {s.guide_pages:,} are the guide's."] if args.guide_model is not None else []),
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


def speed_as_text(prediction: "Prediction") -> str:
    """The prediction as two tables: milliseconds of a step by refresh state, and tokens per second."""
    p = prediction
    batches = list(dict.fromkeys(speed.batch for speed in p.speeds))
    columns = [f"{name} ×{batch}" for batch in batches for name in ("FLOOR", "LAUNCHED", "RECORDED")]
    steps: dict[tuple[str, ...], list[str]] = {("CACHE METHOD", "STATE", "STEPS", "ROWS", "KEYS"): columns}
    for step in p.steps:
        name = (step.cache_method, step.state.upper(), str(step.steps), f"{step.rows:,.0f}", f"{step.keys:,.0f}")
        steps.setdefault(name, []).extend(_cells(step.seconds, 1000))
    speeds: dict[str, list[str]] = {"CACHE METHOD": columns}
    for speed in p.speeds:
        speeds.setdefault(speed.cache_method, []).extend(_cells(speed.tokens_per_second, 1))
    lines = [
        f"{p.model} in {p.dtype} on one {p.gpu}: prompt {p.prompt} + response {p.response} tokens in blocks of "
        f"{p.block_length}, {p.denoising_steps} denoising steps",
        "PREDICTED, NOT MEASURED. docs/performance.md has the formulas, and the sources of their constants.",
        "",
        "Milliseconds per step of so many requests (×), all in one refresh state:",
        format_table([(*name, *cells) for name, cells in steps.items()]),
        "",
        "Tokens/s of all requests:",
        format_table([(name, *cells) for name, cells in speeds.items()]),
        "",
        "FLOOR: what no implementation can leave out, at the GPU's peaks. RECORDED: as CUDA graphs, – where steps",
        "are launched. Rows and keys are of a request.",
    ]
    return "\n".join(lines)


def _cells(times: "Times", scale: int) -> list[str]:
    """To three digits; – for what is not recorded."""
    cells = [f"{value:,.{2 - (value >= 10) - (value >= 100)}f}" for value in (time * scale for time in astuple(times))]
    return cells if times.recorded != times.launched else [*cells[:2], "–"]


def copy_command(args: argparse.Namespace) -> list[str]:
    """The command that writes the quantized copy of the plan's model; empty where there is none to write."""
    if args.quantization in (None, "fp8"):  # made at load time
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
    }
    if args.device == "cpu":
        options["kv_cache_memory_bytes"] = s.pool_bytes
    else:
        options["gpu_memory_utilization"] = args.gpu_memory_utilization
    if s.tensor_parallel_size > 1:
        options["tensor_parallel_size"] = s.tensor_parallel_size
    if args.dtype != "auto":
        options["dtype"] = args.dtype
    if args.quantization == "fp8":
        options["quantization"] = "fp8_per_channel"
    if s.page_size != EngineOptions().page_size:
        options["page_size"] = s.page_size
    model = _copy_of(args) if copy_command(args) else s.model
    return ["dllm", "serve", model, *as_words(options | given(args, GUIDE_SETTINGS))]
