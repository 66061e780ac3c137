"""Shared by commands that run a model: their arguments, the engine, the decoding parameters."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dllm_engine.checkpoints import check_folder
from dllm_engine.cli.arguments import (
    DENOISING,
    STRUCTURE,
    add_denoising_arguments,
    add_options,
    json_schema,
    key_value,
    positive_int,
    whole_number,
)
from dllm_engine.demo import DEMO_MODEL
from dllm_engine.options import AUTO, GUIDE_SETTINGS, EngineOptions
from dllm_engine.quiet import be_quiet, progress_line
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.text import one_line
from dllm_engine.vllm_hooks.release import check_release
from dllm_engine.vllm_hooks.server.start import end_now

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams

    from dllm_engine.front_end import FrontEnd
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams

CACHE_ARGUMENTS = ("cache_method", "page_size", *GUIDE_SETTINGS)
"""Arguments of ``add_cache_arguments`` that are engine options of the same name."""
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cache")
    group.add_argument(
        "--cache-method",
        metavar="NAME",
        default=AUTO,
        help=f"{', '.join(CACHE_METHODS)} (default: none; block where attention goes by blocks)",
    )
    group.add_argument(
        "--cache-option",
        metavar="KEY=VALUE",
        type=key_value,
        action="append",
        default=[],
        help="an option of the cache method, repeatable; `dllm models` lists them",
    )
    group.add_argument(
        "--retention-ratio",
        type=float,
        metavar="R",
        help="share of the tokens outside the running block that pages keep, for cache methods that evict; short for "
        "--cache-option retention_ratio=R",
    )
    add_options(group, EngineOptions, (*GUIDE_SETTINGS, "page_size"))


def add_model_arguments(group: "argparse._ArgumentGroup") -> None:
    """Arguments of loading a model; ``dllm plan`` has these too."""
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="type of weights and activations (default: the checkpoint's)"
    )
    group.add_argument(
        "--max-model-len", type=positive_int, metavar="N", help="most tokens of prompt and response together"
    )
    group.add_argument(
        "--tensor-parallel-size", type=positive_int, default=1, metavar="N", help="devices to split the model over"
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """A model as the command's first word."""
    parser.add_argument(
        "model", metavar="MODEL", help="checkpoint (folder or Hugging Face name), `demo` or `demo-blocks`"
    )


def add_engine_arg(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--engine-arg",
        metavar="KEY=VALUE",
        type=key_value,
        action="append",
        default=[],
        help="any other argument of vllm.LLM, repeatable, for example gpu_memory_utilization=0.5",
    )


def add_engine_arguments(parser: argparse.ArgumentParser, *, with_model: bool = True, with_cache: bool = True) -> None:
    """``with_model=False`` is for commands whose model is a positional argument, ``with_cache=False`` for those that
    choose a cache themselves."""
    group = parser.add_argument_group("engine")
    if with_model:
        group.add_argument(
            "--model", default=DEMO_MODEL, help="folder or Hugging Face name of a checkpoint (default: the demo model)"
        )
    add_model_arguments(group)
    add_options(group, EngineOptions, ("cuda_graphs", "batch_invariant"))
    parser.set_defaults(batch_invariant=False)
    add_engine_arg(group)
    if with_cache:
        add_cache_arguments(parser)
    else:
        no_cache = dict.fromkeys((*CACHE_ARGUMENTS, "retention_ratio")) | {"cache_method": "none", "cache_option": []}
        parser.set_defaults(**no_cache)


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decoding", "Defaults are those of the checkpoint, else of its family.")
    group.add_argument(
        "--gen-length", type=whole_number, metavar="N", help="response tokens (default: the checkpoint's, else 256)"
    )
    add_denoising_arguments(group)
    group.add_argument("--temperature", type=float, default=0.0, metavar="R", help="0 is greedy (default: 0)")
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest tokens of mass P"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens (0: all)")
    group.add_argument("--seed", type=int, metavar="N", help="seed of everything that is drawn at random")
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at end tokens")


def add_structure_arguments(parser: argparse.ArgumentParser) -> None:
    """``STRUCTURE``."""
    group = parser.add_argument_group("structured output", "What a response must match.").add_mutually_exclusive_group()
    group.add_argument("--regex", metavar="REGEX", help="a regular expression, which the whole response matches")
    group.add_argument("--json-schema", type=json_schema, metavar="FILE|JSON", help="a JSON schema")
    group.add_argument("--choice", type=lambda text: text.split(","), metavar="A,B", help="one of several texts")


def structured_outputs(args: argparse.Namespace) -> "StructuredOutputsParams | None":
    """Parameters of ``STRUCTURE``."""
    from vllm.sampling_params import StructuredOutputsParams

    asked = {name.removesuffix("_schema"): vars(args).get(name) for name in STRUCTURE}
    return None if all(value is None for value in asked.values()) else StructuredOutputsParams(**asked)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The cache arguments as engine options; raises ``ValueError`` naming what is unknown or out of range."""
    options = {"cache_options": cache_options(args), **given(args, CACHE_ARGUMENTS)}
    EngineOptions.parse(options)
    return options


def cache_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the cache method, from ``--cache-option`` and ``--retention-ratio``."""
    options = dict(args.cache_option)
    if args.retention_ratio is not None:
        if "retention_ratio" in options:
            raise ValueError("give --retention-ratio or --cache-option retention_ratio=…, not both")
        options["retention_ratio"] = args.retention_ratio
    return options


def given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Arguments ``names`` that have a value."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def prepare(args: argparse.Namespace) -> None:
    """Check what can be checked before anything heavy is imported, and set what vLLM reads from the environment.

    On a single device the engine runs in this process: its errors are raised here, where another process would log
    them.
    """
    engine_options(args)
    check_folder(args.model)
    be_quiet()
    if args.tensor_parallel_size == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    check_release()


def start_engine(
    args: argparse.Namespace,
    check: "Callable[[FrontEnd, DiffusionParams], object] | None" = None,
    *,
    trace: bool = False,
) -> "tuple[LLM, DiffusionParams]":
    """The engine and the decoding parameters that ``args`` ask for.

    Args:
        check: raises ``ValueError`` for requests that the engine would refuse, before the model is loaded.

    Raises:
        ValueError: options out of range, a model that cannot be found.
    """
    be_quiet()
    with progress_line("Importing vLLM"):
        prepare(args)
        params, arguments = decoding_params(args), engine_arguments(args, trace=trace)
        from dllm_engine.front_end import FrontEnd
    if check is not None:
        with naming_model(arguments):
            check(FrontEnd(arguments), params)
    return load(arguments | {"use_tqdm_on_load": sys.stderr.isatty(), **dict(args.engine_arg)}), params


def engine_arguments(args: argparse.Namespace, *, trace: bool = False) -> dict[str, Any]:
    """The arguments of ``LLM`` that ``args`` ask for; raises ``ValueError`` naming what is out of range."""
    names = ("model", "dtype", "max_model_len", "tensor_parallel_size", "cuda_graphs", "batch_invariant")
    same = {name: getattr(args, name) for name in names}
    return {**same, **engine_options(args), "trace": trace, "use_tqdm_on_load": False, **dict(args.engine_arg)}


def load(arguments: dict[str, Any]) -> "LLM":
    """Start an engine with arguments of ``LLM``."""
    from dllm_engine.llm import LLM

    # While an engine in processes of its own loads, vLLM waits for them and would ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, end_now)
    try:
        with naming_model(arguments):
            return LLM(**arguments)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def naming_model(arguments: dict[str, Any]) -> Iterator[None]:
    """Errors of reading the model's files as ``ValueError`` with its name."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot load model {arguments['model']!r}: {one_line(error)}") from error


def decoding_options(args: argparse.Namespace) -> dict[str, Any]:
    """The decoding arguments that differ from ``DiffusionParams``' defaults, as its keyword arguments."""
    from dllm_engine.params import DiffusionParams

    sampling = ("temperature", "top_p", "top_k", "seed", "ignore_eos")
    options = {name: getattr(args, name) for name in ("gen_length", *DENOISING, *sampling)}
    defaults = DiffusionParams()
    return {name: value for name, value in options.items() if value != getattr(defaults, name)}


def decoding_params(args: argparse.Namespace) -> "DiffusionParams":
    """The decoding arguments as parameters; raises ``ValueError`` naming what is out of range."""
    from dllm_engine.params import DiffusionParams

    return DiffusionParams(structured_outputs=structured_outputs(args), **decoding_options(args))
