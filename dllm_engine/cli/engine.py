"""Shared code of commands that run a model: arguments, the engine, and decoding
parameters.
"""

import argparse
import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.checkpoints import check_folder, check_named_files
from dllm_engine.cli.arguments import (
    DENOISING,
    add_options,
    add_value,
    key_value,
    positive_int,
    whole_number,
)
from dllm_engine.demo import DEMO_MODEL
from dllm_engine.options import GUIDE_SETTINGS, EngineOptions
from dllm_engine.quiet import be_quiet, progress_line
from dllm_engine.request_options.fields import RequestOptions
from dllm_engine.request_options.sampling_params import parse_request_options
from dllm_engine.request_options.unmasking import PARALLEL_OPTIONS
from dllm_engine.text import one_line
from dllm_engine.vllm_hooks.release import check_device, check_release
from dllm_engine.vllm_hooks.server.start import end_now

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams

# Names of arguments. Arguments that are not given are None; `LLM`, `DiffusionParams`
# and vLLM have the defaults.
ENGINE = ("dtype", "max_model_len", "tensor_parallel_size")
DECODING = (
    "gen_length",
    *DENOISING,
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "ignore_eos",
)
STRUCTURE = ("regex", "json", "choice")
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, or read it from a file."""
    try:
        value = json.loads(
            text
            if text.lstrip().startswith("{")
            else Path(text).read_text(encoding="utf-8")
        )
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a JSON object nor a file with one: {error}"
        ) from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} holds a {type(value).__name__}, not an object"
        )
    return value


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cache")
    methods = (
        f"{', '.join(CACHE_METHODS)} (default: none; block where attention goes by "
        f"blocks)"
    )
    add_value(group, "--cache-method", str, "NAME", methods)
    more: dict[str, Any] = {"action": "append", "default": [], "dest": "cache_option"}
    meaning = "an option of the cache method, repeatable; `dllm models` lists them"
    add_value(group, "--cache-option", key_value, "KEY=VALUE", meaning, **more)
    ratio = (
        "share of tokens outside the block that evicting methods keep; short for "
        "--cache-option retention_ratio=R"
    )
    add_value(
        group,
        "--retention-ratio",
        lambda text: key_value(f"retention_ratio={text}"),
        "R",
        ratio,
        **more,
    )
    add_options(group, EngineOptions, (*GUIDE_SETTINGS, "page_size"))


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder or Hugging Face name, `demo` or `demo-blocks`",
    )


def add_model_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="type of weights and activations (default: the checkpoint's)",
    )
    add_value(
        group,
        "--max-model-len",
        positive_int,
        "N",
        "most tokens of prompt and response together",
    )
    add_value(
        group,
        "--tensor-parallel-size",
        positive_int,
        "N",
        "devices to split the model over (default: 1)",
    )


def add_engine_arguments(
    parser: argparse.ArgumentParser, *, with_model: bool = True
) -> None:
    """Add arguments about the engine. ``with_model=False``: the model is a positional
    argument.
    """
    group = parser.add_argument_group("engine")
    if with_model:
        group.add_argument(
            "--model",
            default=DEMO_MODEL,
            help="folder or Hugging Face name (default: %(default)s)",
        )
    add_model_arguments(group)
    add_options(
        group,
        EngineOptions,
        ("share_prompts", "anchor_tokens", "cuda_graphs", "batch_invariant"),
    )
    other = (
        "any other argument of vllm.LLM, repeatable, for example "
        "gpu_memory_utilization=0.5"
    )
    add_value(
        group,
        "--engine-arg",
        key_value,
        "KEY=VALUE",
        other,
        action="append",
        default=[],
    )


def add_denoising_arguments(
    group: argparse._ArgumentGroup, without: Iterable[str] = ()
) -> None:
    alternatives = group.add_mutually_exclusive_group()
    for name in (name for name in DENOISING if name not in without):
        add_options(
            alternatives if name in PARALLEL_OPTIONS else group, RequestOptions, [name]
        )


def add_decoding_arguments(
    parser: argparse.ArgumentParser, without: Iterable[str] = ()
) -> None:
    group = parser.add_argument_group(
        "decoding", "Defaults are those of the checkpoint, else of its family."
    )
    add_value(
        group,
        "--gen-length",
        whole_number,
        "N",
        "response tokens, with --auto-length the most (default: the checkpoint's, else "
        "256, with --auto-length 2048)",
    )
    add_denoising_arguments(group, without)
    add_value(group, "--temperature", float, "R", "0 is greedy (default: 0)")
    add_options(group, RequestOptions, ("top_p", "top_k"))
    add_value(group, "--seed", int, "N", "seed of everything that is drawn at random")
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="do not stop at end tokens",
    )


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that answers prompts."""
    add_decoding_arguments(parser)
    add_engine_arguments(parser)
    add_cache_arguments(parser)
    group = parser.add_argument_group(
        "structured output", "What a response must match."
    ).add_mutually_exclusive_group()
    add_value(
        group,
        "--regex",
        str,
        "REGEX",
        "a regular expression, which the whole response matches",
    )
    add_value(
        group, "--json-schema", json_object, "FILE|JSON", "a JSON schema", dest="json"
    )
    add_value(
        group, "--choice", lambda text: text.split(","), "A,B", "one of several texts"
    )


def chosen_arguments(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The values of those arguments in ``names`` that are set."""
    return {
        name: value
        for name in names
        if (value := getattr(args, name, None)) is not None
    }


def with_limit(decoding: dict[str, Any]) -> dict[str, Any]:
    """Decoding options for ``DiffusionParams``: ``gen_length`` becomes a limit if the
    length is chosen.
    """
    if not decoding.get("auto_length") or "gen_length" not in decoding:
        return decoding
    others = {name: x for name, x in decoding.items() if name != "gen_length"}
    return {**others, "max_tokens": decoding["gen_length"]}


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options among the arguments, checked."""
    options = {
        "cache_options": dict(getattr(args, "cache_option", ())),
        **chosen_arguments(args, EngineOptions.model_fields),
    }
    check_named_files(EngineOptions.parse(options))
    return options


def prepare(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``LLM`` from ``args``, checked before anything heavy is imported.
    Also sets environment variables: on a single device the engine runs in this process,
    so that its errors are raised here instead of being logged."""
    arguments = {
        "model": args.model,
        **chosen_arguments(args, ENGINE),
        **engine_options(args),
        **dict(args.engine_arg),
    }
    check_folder(args.model)
    be_quiet()
    if args.tensor_parallel_size in (None, 1):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    check_release()
    check_device()
    return arguments


def start_engine(args: argparse.Namespace) -> "tuple[LLM, DiffusionParams]":
    """Start the engine; returns it with the decoding parameters of ``args``."""
    parse_request_options(chosen_arguments(args, RequestOptions.model_fields))
    be_quiet()
    with progress_line("Importing vLLM"):
        arguments = prepare(args)
        from vllm.sampling_params import StructuredOutputsParams

        from dllm_engine.params import DiffusionParams

        structure = chosen_arguments(args, STRUCTURE)
        structured_outputs = StructuredOutputsParams(**structure) if structure else None
        params = DiffusionParams(
            structured_outputs=structured_outputs,
            **with_limit(chosen_arguments(args, DECODING)),
        )
    return load(arguments), params


def load(arguments: dict[str, Any]) -> "LLM":
    """Start an engine with arguments of ``LLM``. Raises ``ValueError`` if the model's
    files cannot be read.
    """
    from dllm_engine.llm import LLM

    # While an engine in other processes loads, vLLM waits for them and would ignore
    # Ctrl-C.
    before = signal.signal(signal.SIGINT, end_now)
    try:
        return LLM(**arguments)
    except OSError as error:
        raise ValueError(
            f"cannot load model {arguments['model']!r}: {one_line(error)}"
        ) from error
    finally:
        signal.signal(signal.SIGINT, before)
