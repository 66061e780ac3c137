"""Serve a model over HTTP: OpenAI's API, decisions, and the routes of code editors.

Code editors use /v1/fim/completions, /v1/edit/completions, /v1/apply/completions,
/v1/fim/completions/models, /v1/edit/completions/models, /v1/chat/completions/models,
/infill, /completion, /props, /api/generate, /api/show, /api/tags and /api/version.

Everything ``vllm serve`` accepts works here too; ``vllm serve --help=all`` lists it.
"""

import argparse
import json
import os
import sys
from typing import Any

from dllm_engine.checkpoints import check_folder, check_named_files, check_start
from dllm_engine.cli.arguments import (
    DENOISING,
    CommandParser,
    add_options,
    add_value,
    stated_arguments,
)
from dllm_engine.cli.config_file import expand_config
from dllm_engine.cli.engine import (
    add_cache_arguments,
    add_denoising_arguments,
    add_model,
    chosen_arguments,
    json_object,
)
from dllm_engine.demo import DEMO_MODELS, model_path
from dllm_engine.options import OPTIONS_KEY, EngineOptions
from dllm_engine.quiet import be_quiet_server, last_time
from dllm_engine.vllm_hooks import patch
from dllm_engine.vllm_hooks.cpu_distribution import (
    register as register_cpu_distribution,
)
from dllm_engine.vllm_hooks.release import check_device, check_release
from dllm_engine.vllm_hooks.serve_options import check_serve_options
from dllm_engine.vllm_hooks.server import start as server_start

ADDITIONAL_CONFIG = "--additional-config"
_OTHERS = (
    "share_prompts",
    "anchor_tokens",
    "refresh_ratio",
    "steps_per_dispatch",
    "lora_path",
    "max_automaton_states",
    "max_automaton_seconds",
    "max_automaton_search",
    "decision_way",
    "decision_template",
    "decision_joint",
    "decision_calibration",
    "cuda_graphs",
    "batch_invariant",
    "trace",
    "playground",
    "fim_markers",
)
"""Engine options that no other group has."""
REQUESTS = """For requests that name none themselves (in `vllm_xargs`). They are fitted to the length of a response: a
block is at most the response, and a response takes at least a step per block and at most one per token. A request that
names `steps` is not given the threshold. The length itself is vLLM's to set: --override-generation-config
'{"max_new_tokens": 512}' (default: the checkpoint's, else 256)."""


def add_arguments(parser: CommandParser) -> None:
    parser.expand = expand_config
    parser.usage = (
        "dllm serve MODEL [options of this command] [options of `vllm serve`]"
    )
    parser.allow_abbrev = False
    parser.set_defaults(passes_on_unknown=True)
    add_model(parser)
    add_cache_arguments(parser)
    add_denoising_arguments(parser.add_argument_group("requests", REQUESTS))
    other = parser.add_argument_group("other")
    add_options(other, EngineOptions, _OTHERS)
    additional = (
        f"vLLM's own option; the arguments above are put into its key {OPTIONS_KEY!r}"
    )
    add_value(other, ADDITIONAL_CONFIG, json_object, "JSON", additional)
    parser.set_defaults(own_options=parser._option_string_actions)


def run(args: argparse.Namespace) -> int:
    server_start.end_on_signals()
    check_serve_options(args.unknown, args.own_options)
    is_quiet = be_quiet_server(stated_arguments(args.unknown))
    if is_quiet and not sys.stderr.isatty():
        args.unknown = ["--no-use-tqdm-on-load", *args.unknown]
    # vLLM reads it when imported. Code editors send lists of users.
    os.environ.setdefault("VLLM_MAX_STOP_STRINGS", "64")
    arguments = vllm_arguments(args)
    check_folder(args.model)
    if is_quiet:
        key = server_start.started_name(model_path(args.model))
        what = f"dllm serve {args.model}: importing vLLM, then loading the model"
        print(f"{what}{last_time(key)} …", flush=True)
    check_release()
    check_device()
    check_start(args.model, stated_arguments(args.unknown))
    from vllm.entrypoints.cli.main import main as vllm_main

    from dllm_engine.vllm_hooks import table  # this checks which vLLM is installed

    # With VLLM_TARGET_DEVICE=cpu, vLLM loads no platform plugins.
    register_cpu_distribution()
    sys.argv = ["vllm", *arguments]
    patch.apply(table.STARTING)
    server_start.end_at_once(vllm_main)
    return 0


def vllm_arguments(args: argparse.Namespace) -> list[str]:
    """The command line of ``vllm`` for ``args``."""
    model = [model_path(args.model)]
    if args.model in DEMO_MODELS and "served_model_name" not in stated_arguments(
        args.unknown
    ):
        model += ["--served-model-name", args.model]
    additional = merged_config(args)
    if additional and any(
        word.replace("_", "-").startswith(f"{ADDITIONAL_CONFIG}.")
        for word in args.unknown
    ):
        raise ValueError(
            f"{ADDITIONAL_CONFIG}.NAME cannot be given beside options of this command, "
            f"which it would replace; give {ADDITIONAL_CONFIG} as JSON"
        )
    config_words = [ADDITIONAL_CONFIG, json.dumps(additional)] if additional else []
    return ["serve", *model, *config_words, *args.unknown]


def merged_config(args: argparse.Namespace) -> dict[str, Any]:
    """The user's ``--additional-config``, whose key for this plugin is merged with the
    other arguments, which take precedence. Empty if there are none."""
    additional = args.additional_config or {}
    options = additional.get(OPTIONS_KEY, {})
    if not isinstance(options, dict):
        raise ValueError(
            f"{ADDITIONAL_CONFIG}={json.dumps(additional)}: {OPTIONS_KEY!r} must be a "
            f"JSON object too"
        )
    if args.cache_method not in (None, options.get("cache_method", args.cache_method)):
        # The user's cache options are for another method.
        options = {
            name: value for name, value in options.items() if name != "cache_options"
        }
    stated = chosen_arguments(args, EngineOptions.model_fields)
    for name, value in {
        "cache_options": dict(args.cache_option),
        "request_defaults": chosen_arguments(args, DENOISING),
    }.items():
        if value:
            before = options.get(name)
            stated[name] = (before if isinstance(before, dict) else {}) | value
    options = options | stated
    engine = EngineOptions.parse(options)
    check_named_files(engine)
    if engine.request_defaults:
        from dllm_engine.request_options.defaults import check_request_defaults

        check_request_defaults(engine)
    return additional | {OPTIONS_KEY: options} if options else additional
