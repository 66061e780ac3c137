"""``dllm models``: lists checkpoints, cache methods, unmasking policies and rules of parallel unmasking; and
``dllm demo-path``: where a demo model lies, for tools that want a path."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from dllm_engine.demo import DEMO_MODEL, DEMO_MODELS, demo_model_path
from dllm_engine.families import FAMILIES
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.text import format_table


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "models", help="list supported checkpoints, cache methods with their options, and unmasking policies"
    )
    parser.add_argument("--json", action="store_true", help="as JSON; options of cache methods as JSON schemas")
    parser.set_defaults(run=run)
    parser = commands.add_parser("demo-path", help="print the folder of a demo model")
    parser.add_argument(
        "model",
        nargs="?",
        choices=DEMO_MODELS,
        default=DEMO_MODEL,
        metavar="MODEL",
        help=f"{' or '.join(DEMO_MODELS)} (default: %(default)s)",
    )
    parser.set_defaults(run=print_demo_path)


def run(args: argparse.Namespace) -> int:
    supported = describe()
    print(json.dumps(supported, indent=2) if args.json else as_tables(supported))
    return 0


def print_demo_path(args: argparse.Namespace) -> int:
    print(demo_model_path(args.model))
    return 0


def describe() -> dict[str, Any]:
    """Everything an engine can be asked for, from the registries that check it."""
    from dllm_engine.scheduler.options.request_fields import PARALLEL_OPTIONS, RequestOptions
    from dllm_engine.scheduler.unmasking_policies import PARALLEL_RULES, UNMASKING_POLICIES

    rules = RequestOptions.model_json_schema()["properties"]
    return {
        "families": [asdict(family) for family in FAMILIES.values()],
        "cache_methods": {
            name: method.options.model_json_schema().get("properties", {}) for name, method in CACHE_METHODS.items()
        },
        "unmasking": list(UNMASKING_POLICIES),
        "parallel_unmasking": {
            name: {
                "value": next(kind for kind in rules[name]["anyOf"] if kind["type"] != "null"),
                "policies": [p.name for p in UNMASKING_POLICIES.values() if PARALLEL_RULES[name].suits(p)],
            }
            for name in PARALLEL_OPTIONS
        },
    }


def as_tables(supported: dict[str, Any]) -> str:
    """The output of ``describe``, one table per kind."""
    checkpoints = [
        (name, family["architecture"], family["name"])
        for family in supported["families"]
        for name in family["checkpoints"]
    ]
    methods = []
    for name, options in supported["cache_methods"].items():
        # The first option is on the method's own line, the others are below.
        lines = [(option, _allowed(schema), _first_sentence(schema)) for option, schema in options.items()]
        for position, line in enumerate(lines or [("(no options)", "", "")]):
            methods.append((name if position == 0 else "", *line))
    policies = [
        (name, ", ".join(f["name"] for f in supported["families"] if f["default_unmasking"] == name))
        for name in supported["unmasking"]
    ]
    rules = [
        (name, _allowed(rule["value"]), ", ".join(rule["policies"]))
        for name, rule in supported["parallel_unmasking"].items()
    ]
    return "\n\n".join(
        format_table(rows)
        for rows in (
            [("CHECKPOINT", "ARCHITECTURE", "FAMILY"), *checkpoints],
            [("CACHE METHOD", "OPTION", "VALUES", "MEANING"), *methods],
            [("UNMASKING POLICY", "DEFAULT FOR"), *policies],
            [("PARALLEL UNMASKING", "VALUES", "WITH POLICIES"), *rules],
        )
    )


_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _allowed(schema: dict[str, Any]) -> str:
    """A JSON schema's values in words, such as ``number > 0, ≤ 1; default 0.5``."""
    if "anyOf" in schema:
        kind = " or ".join(_allowed(choice) for choice in schema["anyOf"])
    elif "enum" in schema:
        kind = " | ".join(map(str, schema["enum"]))
    else:
        kind = str(schema.get("const", schema.get("type", "any value")))
    limits = ", ".join(f"{sign} {schema[key]}" for key, sign in _LIMITS.items() if key in schema)
    default = f"; default {json.dumps(schema['default'])}" if "default" in schema else ""
    return f"{kind} {limits}".rstrip() + default


def _first_sentence(schema: dict[str, Any]) -> str:
    """First sentence of an option's meaning."""
    return " ".join(schema.get("description", "").replace("``", "").split()).partition(". ")[0].rstrip(".")
