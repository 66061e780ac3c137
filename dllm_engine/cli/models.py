"""List supported checkpoints, cache methods with their options,
and unmasking policies.
"""

import argparse
import json
import shutil
import textwrap
from dataclasses import asdict
from functools import partial
from typing import Any

from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.decoding.option_types import MOST_TOKENS
from dllm_engine.decoding.unmasking_policies import (
    PARALLEL_RULES,
    UNMASKING_POLICIES,
)
from dllm_engine.entry_points import OWN_PACKAGE, EntryPointGroup
from dllm_engine.families import FAMILIES
from dllm_engine.request_options.fields import RequestOptions
from dllm_engine.request_options.unmasking import PARALLEL_OPTIONS

_KINDS = {
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "string": "str",
    "array": "list",
    "object": "dict",
    "null": "None",
}
_LIMITS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
}
_DETAIL = " " * 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="as JSON; options of cache methods as JSON schemas",
    )


def run(args: argparse.Namespace) -> int:
    supported = describe()
    print(
        json.dumps(supported, indent=2)
        if args.json
        else as_text(supported, shutil.get_terminal_size().columns)
    )
    return 0


def describe() -> dict[str, Any]:
    """Everything that an engine supports, from the registries that check options."""
    schemas = RequestOptions.model_json_schema()["properties"]
    policies = UNMASKING_POLICIES.values()
    rules = {}
    for name in PARALLEL_OPTIONS:
        value = next(kind for kind in schemas[name]["anyOf"] if kind["type"] != "null")
        rules[name] = {
            "value": value,
            "policies": [p.name for p in policies if PARALLEL_RULES[name].suits(p)],
        }
    return {
        "families": [asdict(family) for family in FAMILIES.values()],
        "cache_methods": {
            name: method.options.model_json_schema().get("properties", {})
            for name, method in CACHE_METHODS.items()
        },
        "unmasking": list(UNMASKING_POLICIES),
        "parallel_unmasking": rules,
        "packages": {
            group.group: {name: group.package(name) for name in group}
            for group in (CACHE_METHODS, PARALLEL_RULES)
        },
    }


def as_text(supported: dict[str, Any], width: int) -> str:
    """The output of ``describe`` in lines of at most ``width``. Entries of other
    packages show the package after the name.
    """
    families = supported["families"]
    packages = supported["packages"]

    def named(name: str, group: EntryPointGroup) -> str:
        package = packages[group.group][name]
        return name if package == OWN_PACKAGE else f"{name} ({package})"

    entries = ["CHECKPOINTS, by family and architecture"]
    for family in families:
        entries.append(f"  {family['name']} ({family['architecture']})")
        entries += [f"    {name}" for name in family["checkpoints"]]
    entries += ["", "CACHE METHODS and their options"]
    for name, options in supported["cache_methods"].items():
        entries.append(f"  {named(name, CACHE_METHODS)}")
        for option, schema in options.items():
            entries += [
                f"    {option}: {allowed(schema)}; default {schema['default']!r}",
                f"{_DETAIL}{_first_sentence(schema)}",
            ]
    entries += ["", "UNMASKING POLICIES"]
    for name in supported["unmasking"]:
        users = [f["name"] for f in families if f["default_unmasking"] == name]
        entries.append(f"  {name}")
        entries += [f"{_DETAIL}default for {', '.join(users)}"] if users else []
    entries += ["", "PARALLEL UNMASKING, with which policies"]
    for name, rule in supported["parallel_unmasking"].items():
        entries += [
            f"  {named(name, PARALLEL_RULES)}: {allowed(rule['value'])}",
            f"{_DETAIL}with {', '.join(rule['policies'])}",
        ]
    folded = partial(
        textwrap.fill,
        width=width,
        subsequent_indent=_DETAIL,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(map(folded, entries))


def allowed(schema: dict[str, Any]) -> str:
    """The values that a JSON schema allows, in words, such as ``float > 0, ≤ 1``."""
    if "anyOf" in schema:
        return " or ".join(map(allowed, schema["anyOf"]))
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return ", ".join(map(repr, schema["enum"]))
    limits = [
        f"{sign} {schema[key]}"
        for key, sign in _LIMITS.items()
        if schema.get(key, MOST_TOKENS) != MOST_TOKENS
    ]
    return f"{_KINDS[schema['type']]} {', '.join(limits)}".rstrip()


def _first_sentence(schema: dict[str, Any]) -> str:
    text = " ".join(schema.get("description", "").replace("``", "").split())
    return text.partition(". ")[0].rstrip(".")
