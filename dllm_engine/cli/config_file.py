"""The file of ``dllm serve --config``. Its keys are ``model``, and options of this
command and of ``vllm serve``.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_engine.cli.arguments import CommandParser, stated_arguments
from dllm_engine.text import did_you_mean, one_line
from dllm_engine.vllm_hooks.cpu_distribution import (
    register as register_cpu_distribution,
)
from dllm_engine.vllm_hooks.release import check_release
from dllm_engine.vllm_hooks.serve_options import is_option, serve_options

CONFIG = "--config"


def expand_config(parser: CommandParser, words: Sequence[str]) -> list[str]:
    """Expand a command line: options of the named file come before ``words``, so that
    the command line takes precedence. Raises ``ValueError`` naming the file and a wrong
    key."""
    stated = stated_arguments(words)
    if "config" not in stated or "-h" in words or "--help" in words:
        return list(words)
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument(CONFIG, action="append", nargs="?")
    named, words = reader.parse_known_args(words)
    if len(named.config) > 1:
        raise ValueError(f"{CONFIG} is given {len(named.config)} times; give one file")
    if not named.config[0]:
        raise ValueError(f"{CONFIG} names no file; give a YAML file")
    path = Path(named.config[0])
    options = _read(path)
    model = options.pop("model", None)
    if words and not words[0].startswith("-"):
        model, *words = words
    if not isinstance(model, str):
        raise ValueError(
            f"{path}: key 'model' must name the model; or give MODEL as the first "
            f"argument"
        )
    replaced = _replaced(parser, stated, options)
    expanded = [model]
    others = {}
    for name, value in options.items():
        action = parser._option_string_actions.get(f"--{name}")
        if action is None:
            others[name] = value
        elif action.dest not in replaced:
            expanded += _own_words(parser, action, path, name, value)
    return [*expanded, *_vllm_words(parser, path, others), *words]


def _read(path: Path) -> dict[str, Any]:
    """The values of the file by option, with dashes."""
    import yaml

    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(
            f"{CONFIG} {path}: give a YAML file, whose name ends with .yaml or .yml"
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"{CONFIG} {path} cannot be read: {one_line(error)}"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(
            f"{CONFIG} {path} holds a {type(values).__name__}; write a line `option: "
            f"value` for each option"
        )
    return {str(key).replace("_", "-"): value for key, value in values.items()}


def _replaced(
    parser: CommandParser, stated: Mapping[str, str], options: Mapping[str, Any]
) -> set[str]:
    """Options of the file that options of the command line replace: their alternatives,
    and the options of another cache method."""
    replaced = set()
    for group in parser._mutually_exclusive_groups:
        names = {action.dest for action in group._group_actions}
        if names & stated.keys():
            replaced |= names
    method = stated.get("cache_method")
    if method is not None and method != options.get("cache-method"):
        replaced.add("cache_option")
    return replaced


def _own_words(
    parser: CommandParser, action: argparse.Action, path: Path, name: str, value: Any
) -> list[str]:
    """An option of this command as words of a command line."""
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"{path}: {name} must be true or false, not {value!r}")
        return [f"--{name}" if value else f"--no-{name}"]
    if value is None:
        raise ValueError(f"{path}: {name} has no value; give one, or leave the key out")
    values = [value]
    if action.dest == "cache_option" and isinstance(value, dict):
        values = [f"{key}={json.dumps(part)}" for key, part in value.items()]
    elif action.dest == "cache_option" and isinstance(value, list):
        values = value
    texts = [_as_text(part) for part in values]
    try:
        for text in texts:
            parser._check_value(action, parser._get_value(action, text))
    except argparse.ArgumentError as error:
        raise ValueError(f"{path}: {name}: {error.message}") from error
    return [f"--{name}={text}" for text in texts]


def _as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def _vllm_words(
    parser: CommandParser, path: Path, options: Mapping[str, Any]
) -> list[str]:
    """Options of ``vllm serve`` as words, like vLLM reads them from its file."""
    names = serve_options()
    for name in options:
        if names and not is_option(name.partition(".")[0], names):
            vllm_names = [
                word.removeprefix("--") for word in parser._option_string_actions
            ]
            raise ValueError(
                f"{path}: key {name!r} is unknown{did_you_mean(name, [*vllm_names, *names])}"
            )
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)] if value else []
        elif value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", _as_text(value)]
        elif f"--no-{name}" in _vllm_flags():
            words.append(f"--no-{name}")
    return words


def _vllm_flags() -> Mapping[str, Any]:
    """Options of vLLM's parser, by flag."""
    check_release()
    register_cpu_distribution()
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())._option_string_actions
