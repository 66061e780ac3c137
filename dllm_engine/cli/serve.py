"""``dllm serve``: ``vllm serve`` with the options of diffusion engines as arguments of their own."""

import argparse
import json
import sys
from typing import Any

from dllm_engine.cli.engine import (
    BATCH_INVARIANT_HELP,
    CUDA_GRAPHS_HELP,
    add_cache_arguments,
    add_denoising_arguments,
    check_vllm,
    engine_options,
    positive_int,
)
from dllm_engine.cli.errors import CommandError
from dllm_engine.demo import DEMO_MODEL, model_path
from dllm_engine.options import OPTIONS_KEY, EngineOptions

_REQUEST_DEFAULTS = ("block_length", "steps", "unmasking", "threshold")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP (OpenAI's API)",
        usage="dllm serve MODEL [options of this command] [options of `vllm serve`]",
        description="Everything `vllm serve` accepts works here too; `vllm serve --help=all` lists it.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hugging Face name of a checkpoint, or `demo`")
    add_cache_arguments(parser)
    requests = parser.add_argument_group(
        "requests",
        "For requests that name none themselves (in `vllm_xargs`). They are fitted to the length of a response: a "
        "block is at most the response, and a response takes at least a step per block and at most one per token. A "
        "request that names `steps` is not given the threshold. The length itself is vLLM's to set: "
        "--override-generation-config '{\"max_new_tokens\": 512}' (default: the "
        "checkpoint's, else 256).",
    )
    add_denoising_arguments(requests)
    other = parser.add_argument_group("other")
    other.add_argument(
        "--refresh-ratio",
        type=float,
        metavar="R",
        help="rows that a long request refreshes per row of short ones beside it: a smaller ratio evens the gaps "
        "between their blocks, a large one (1e9) bounds nothing (default: 1)",
    )
    other.add_argument(
        "--steps-per-dispatch",
        type=positive_int,
        metavar="N",
        help="denoising steps that workers run on their own while nobody waits and no block is complete; new requests "
        "and disconnects wait for them (default: 1)",
    )
    other.add_argument("--no-playground", action="store_true", help="leave out the page /playground")
    other.add_argument("--cuda-graphs", action="store_true", help=CUDA_GRAPHS_HELP)
    other.add_argument("--batch-invariant", action="store_true", help=BATCH_INVARIANT_HELP)
    other.add_argument("--trace", action="store_true", help="report per forward pass what was unmasked and computed")
    other.add_argument(
        "--additional-config",
        "--additional_config",
        metavar="JSON",
        help=f"vLLM's own option; the arguments above are put into its key {OPTIONS_KEY!r}",
    )
    parser.set_defaults(run=run, passes_on_unknown=True)


def run(args: argparse.Namespace) -> int:
    arguments = vllm_arguments(args)
    check_vllm()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv = ["vllm", *arguments]
    vllm_main()
    return 0


def vllm_arguments(args: argparse.Namespace) -> list[str]:
    """The command line of ``vllm`` that does what ``args`` ask for."""
    model = [model_path(args.model)]
    named = any(a.replace("_", "-").startswith("--served-model-name") for a in args.unknown)
    if args.model == DEMO_MODEL and not named:
        model += ["--served-model-name", DEMO_MODEL]
    if any(a.replace("_", "-").startswith("--additional-config.") for a in args.unknown):
        raise CommandError("give --additional-config as one JSON object here; vLLM's dotted form would replace it")
    additional = merged_config(args)
    return ["serve", *model, *(["--additional-config", json.dumps(additional)] if additional else []), *args.unknown]


def merged_config(args: argparse.Namespace) -> dict[str, Any]:
    """The user's ``--additional-config`` with the other arguments written over its key for this plugin.

    Empty where nothing is asked for, so that a ``--config`` file may still ask.
    """
    try:
        additional = json.loads(args.additional_config or "{}")
    except ValueError as error:
        raise CommandError(f"--additional-config={args.additional_config!r} is not JSON: {error}") from error
    options = additional.get(OPTIONS_KEY, {}) if isinstance(additional, dict) else None
    if not isinstance(options, dict):
        raise CommandError(
            f"--additional-config={args.additional_config!r} must be a JSON object, and so must its key {OPTIONS_KEY!r}"
        )
    if args.cache_method != "none" or args.cache_option or args.retention_ratio is not None:
        options = options | engine_options(args)
    if args.page_size is not None:
        options = options | {"page_size": args.page_size}
    if args.guide_model is not None:
        options = options | {"guide_model": args.guide_model}
    if args.guide_tokens_per_token is not None:
        options = options | {"guide_tokens_per_token": args.guide_tokens_per_token}
    if args.refresh_ratio is not None:
        options = options | {"refresh_ratio": args.refresh_ratio}
    if args.steps_per_dispatch is not None:
        options = options | {"steps_per_dispatch": args.steps_per_dispatch}
    if defaults := {name: getattr(args, name) for name in _REQUEST_DEFAULTS if getattr(args, name) is not None}:
        check_vllm()  # what checks them needs it
        options = options | {"request_defaults": options.get("request_defaults", {}) | defaults}
    if args.trace:
        options = options | {"trace": True}
    if args.cuda_graphs:
        options = options | {"cuda_graphs": True}
    if args.batch_invariant:
        options = options | {"batch_invariant": True}
    if args.no_playground:
        options = options | {"playground": False}
    EngineOptions.parse(options)
    return additional | {OPTIONS_KEY: options} if options else additional
