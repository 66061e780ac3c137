"""Serve a model over HTTP (OpenAI's API).

Everything ``vllm serve`` accepts works here too; ``vllm serve --help=all`` lists it.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dllm_engine.checkpoints import check_start
from dllm_engine.cli.arguments import (
    DENOISING,
    CommandParser,
    add_denoising_arguments,
    add_options,
    add_value,
    json_value,
    positive_int,
)
from dllm_engine.cli.engine import CACHE, add_cache_arguments, add_model, given
from dllm_engine.demo import DEMO_MODELS, model_path
from dllm_engine.evaluation.tuning import chosen_setting
from dllm_engine.options import OPTIONS_KEY, PAPER, EngineOptions
from dllm_engine.scheduler.options.request_fields import with_defaults
from dllm_engine.text import one_line
from dllm_engine.vllm_hooks.cpu_distribution import register as register_cpu_distribution
from dllm_engine.vllm_hooks.release import check_release
from dllm_engine.vllm_hooks.server import start as server_start

OTHER_SETTINGS = (
    *("refresh_ratio", "steps_per_dispatch", "lora_path"),
    *("max_automaton_states", "max_automaton_seconds", "max_automaton_search"),
    *("cuda_graphs", "batch_invariant", "trace", "playground"),
)
"""Arguments that are engine options of the same name, beside those about the cache."""
ADDITIONAL_CONFIG = "--additional-config"
REQUESTS = """For requests that name none themselves (in `vllm_xargs`). They are fitted to the length of a response: a
block is at most the response, and a response takes at least a step per block and at most one per token. A request that
names `steps` is not given the threshold. The length itself is vLLM's to set: --override-generation-config
'{"max_new_tokens": 512}' (default: the checkpoint's, else 256)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage, parser.allow_abbrev = "dllm serve MODEL [options of this command] [options of `vllm serve`]", False
    parser.set_defaults(parser=parser, passes_on_unknown=True)
    add_model(parser)
    add_cache_arguments(parser)
    add_denoising_arguments(parser.add_argument_group("requests", REQUESTS))
    other = parser.add_argument_group("other")
    add_options(other, EngineOptions, OTHER_SETTINGS)
    additional = f"vLLM's own option; the arguments above are put into its key {OPTIONS_KEY!r}"
    add_value(other, ADDITIONAL_CONFIG, str, "JSON", additional)
    settings = "a result of `dllm tune`: cache and request defaults are those it chose, where other arguments do not "
    add_value(other, "--settings", Path, "FILE", settings + "say otherwise")
    batch = "which of its batch sizes is the load to expect (default: the largest)"
    add_value(other, "--settings-batch", positive_int, "N", batch)
    config = "YAML with options of this command and of `vllm serve`, without the dashes"
    add_value(other, "--config", str, "FILE", config)


def run(args: argparse.Namespace) -> int:
    if args.config is not None:
        check_release()
        add_config_file(args)
    check_listening(stated_arguments(args.unknown))
    server_start.end_on_signals()
    arguments = vllm_arguments(args)
    check_release()
    check_flags(args.parser, args.unknown)
    check_start(args.model, stated_arguments(args.unknown))
    from vllm.entrypoints.cli.main import main as vllm_main

    register_cpu_distribution()  # with VLLM_TARGET_DEVICE=cpu, vLLM loads no platform plugins
    sys.argv = ["vllm", *arguments]
    vllm_main()
    return 0


def vllm_parser() -> Any:
    """The parser of ``vllm serve``."""
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def add_config_file(args: argparse.Namespace) -> None:
    """Complete ``args`` from their YAML file, which vLLM's own function reads."""
    try:
        words = vllm_parser().load_config_file(args.config)
    except Exception as error:  # whatever the YAML is
        raise ValueError(f"--config {args.config} cannot be read: {one_line(error)}") from error
    if "--model" in words:  # MODEL takes its place, as for vLLM
        del words[(named := words.index("--model")) : named + 2]
    stated, unknown = args.parser.parse_known_args([args.model, *words])
    above = {name: value for name, value in vars(args).items() if value not in (None, [])}
    vars(args).update(vars(stated) | above | {"unknown": unknown + args.unknown})


def check_flags(parser: CommandParser, flags: list[str]) -> None:
    """Refuse a flag that neither ``parser`` nor vLLM knows, which may be abbreviated."""
    vllm_actions = vllm_parser()._option_string_actions
    for name in stated_arguments(flags):
        flag = f"--{name.replace('_', '-')}"
        if not any(known.startswith(flag) for known in vllm_actions):
            raise ValueError(f"{flag} is unknown{parser.closest(flag, vllm_actions)}")


def stated_arguments(flags: list[str]) -> dict[str, str]:
    """The values of vLLM's ``flags`` by name, as text. The last one of a name counts; ``--a.b`` counts as ``a``."""
    stated = {}
    for flag, following in zip(flags, [*flags[1:], ""], strict=False):
        name, equals, value = flag.partition("=")
        if name.startswith("--"):
            stated[name[2:].partition(".")[0].replace("-", "_")] = value if equals else following
    return stated


def check_listening(stated: dict[str, str]) -> None:
    """Refuse an address that the server could not listen on, before vLLM is imported."""
    if stated.keys() & {"headless", "uds", "data_parallel_multi_port_external_lb"}:
        return  # it listens elsewhere, or nowhere
    port = stated.get("port", "8000")
    if not port.isdecimal():
        raise ValueError(f"--port {port} is not a whole number")
    server_start.check_address(stated.get("host", ""), int(port))


def vllm_arguments(args: argparse.Namespace) -> list[str]:
    """The command line of ``vllm`` for ``args``."""
    model = [model_path(args.model)]
    dotted, others = take_dotted(args.unknown)
    if args.model in DEMO_MODELS and "served_model_name" not in stated_arguments(others):
        model += ["--served-model-name", args.model]
    additional = merged_config(args, dotted)
    return ["serve", *model, *([ADDITIONAL_CONFIG, json.dumps(additional)] if additional else []), *others]


def take_dotted(words: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """The object that ``--additional-config.a.b VALUE`` in ``words`` spell, and the other words."""
    spelled: dict[str, Any] = {}
    others, remaining = [], iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        option, *keys = name.split(".")
        if not keys or option.replace("_", "-") != ADDITIONAL_CONFIG:
            others.append(word)
            continue
        if not equals and (value := next(remaining, "")) == "":
            raise ValueError(f"{name} needs a value")
        part = json_value(value)
        for key in reversed(keys):
            part = {key: part}
        spelled = merged(spelled, part)
    return spelled, others


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Two JSON objects merged; where both have a value, that of ``above`` wins."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def merged_config(args: argparse.Namespace, dotted: dict[str, Any]) -> dict[str, Any]:
    """The user's ``--additional-config``, overridden by its ``dotted`` parts; in its key for this plugin, overridden by
    the other arguments. Empty if there are none."""
    try:
        additional = json.loads(args.additional_config or "{}")
    except ValueError as error:
        raise ValueError(f"{ADDITIONAL_CONFIG}={args.additional_config!r} is not JSON: {error}") from error
    if isinstance(additional, dict):
        additional = merged(additional, dotted)
    if not isinstance(additional, dict) or not isinstance(options := additional.get(OPTIONS_KEY, {}), dict):
        raise ValueError(
            f"{ADDITIONAL_CONFIG}={args.additional_config!r} must be a JSON object, and so must its key {OPTIONS_KEY!r}"
        )
    if args.cache_method not in (None, options.get("cache_method", args.cache_method)):
        options = {name: value for name, value in options.items() if name != "cache_options"}  # another method's
    stated = given(args, (*CACHE, *OTHER_SETTINGS))
    if args.cache_option:
        stated["cache_options"] = dict(args.cache_option)
        if options.get("cache_options") == PAPER:
            options = options | {"cache_options": {}}
    if defaults := given(args, DENOISING):
        check_release()  # what checks them needs it
        stated["request_defaults"] = defaults
    options = above_settings(merged(options, stated), args)
    engine = EngineOptions.parse(options)
    if engine.request_defaults:
        from dllm_engine.scheduler.options.resolve import check_request_defaults

        check_request_defaults(engine)
    return additional | {OPTIONS_KEY: options} if options else additional


def above_settings(options: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Engine options laid over those of ``--settings``, if that is given.

    A model of another name may be a copy of the same one, or tuned further, so it is a warning and no error. Raises
    ``ValueError`` for a file that holds no chosen setting.
    """
    if args.settings is None:
        if args.settings_batch is not None:
            raise ValueError(
                f"--settings-batch {args.settings_batch} says which setting of --settings to take; give both"
            )
        return options
    model, chosen = chosen_setting(args.settings, args.settings_batch)
    if model != args.model:
        print(
            f"dllm: warning: {args.settings} was made with model {model}, this is {args.model}: its accuracy and speed "
            f"say nothing here; run `dllm tune {args.model}`",
            file=sys.stderr,
        )
    below = chosen["engine"]
    if options.get("cache_method", below["cache_method"]) != below["cache_method"]:
        below = {}  # its cache options are another method's
    defaults = with_defaults(options.get("request_defaults", {}), chosen["decoding"])
    return merged(below, options) | {"request_defaults": defaults}
