"""The file of ``dllm serve --config``: its keys are options of this command and of
``vllm serve``, and ``model``.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_engine.cli.arguments import CommandParser, stated_arguments
from dllm_engine.text import did_you_mean
from dllm_engine.vllm_hooks.cpu_distribution import (
    register as register_cpu_distribution,
)
from dllm_engine.vllm_hooks.release import check_release
from dllm_engine.vllm_hooks.serve_options import is_option, serve_options

CONFIG = "--config"


def expand_config(parser: CommandParser, words: Sequence[str]) -> list[str]:
    """The command line ``words`` with the options of the file that they name before
    them, so that those of the command line count; raises ``ValueError`` with the file
    and the key that is wrong."""
    stated = stated_arguments(words)
    if "config" not in stated or "-h" in words or "--help" in words:
        return list(words)
    path, words = _without_config(words)
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


def _without_config(words: Sequence[str]) -> tuple[Path, list[str]]:
    """The file that ``words`` name, and the other words."""
    at = [index for index, word in enumerate(words) if word.partition("=")[0] == CONFIG]
    if len(at) > 1:
        raise ValueError(f"{CONFIG} is given {len(at)} times; give one file")
    (index,) = at
    _, equals, name = words[index].partition("=")
    end = index + 1
    if not equals:
        name = "".join(words[end : end + 1])
        end += 1
    if not name:
        raise ValueError(f"{CONFIG} names no file; give a YAML file")
    return Path(name), [*words[:index], *words[end:]]


def _read(path: Path) -> dict[str, Any]:
    """The file's values by option, with dashes."""
    import yaml

    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(
            f"{CONFIG} {path}: give a YAML file, whose name ends with .yaml or .yml"
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"{CONFIG} {path} cannot be read: {' '.join(str(error).split())}"
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
    """Our options of the file that cannot stand beside those of the command line:
    alternatives of these, and the options of another cache method."""
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
    """An option of this command as words of its command line."""
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
    words = []
    for part in values:
        text = part if isinstance(part, str) else json.dumps(part)
        try:
            parser._check_value(action, parser._get_value(action, text))
        except argparse.ArgumentError as error:
            raise ValueError(f"{path}: {name}: {error.message}") from error
        words.append(f"--{name}={text}")
    return words


def _vllm_words(
    parser: CommandParser, path: Path, options: Mapping[str, Any]
) -> list[str]:
    """Options of ``vllm serve`` as words, as vLLM makes them of its own file."""
    if not options:
        return []
    names = serve_options()
    for name in options:
        if names and not is_option(name.partition(".")[0], names):
            own = [
                option.removeprefix("--") for option in parser._option_string_actions
            ]
            raise ValueError(
                f"{path}: key {name!r} is unknown{did_you_mean(name, [*own, *names])}"
            )
    check_release()
    register_cpu_distribution()
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = make_arg_parser(FlexibleArgumentParser())._option_string_actions
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name}"
        if isinstance(value, bool):
            if value:
                words.append(flag)
            elif f"--no-{name}" in known:
                words.append(f"--no-{name}")
        elif isinstance(value, list):
            words += [flag, *map(str, value)] if value else []
        else:
            words += [
                flag,
                json.dumps(value) if isinstance(value, dict) else str(value),
            ]
    return words
