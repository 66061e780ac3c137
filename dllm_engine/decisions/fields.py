"""Fields of a decision, from a JSON schema. The process that builds a decision reads
them, so this module imports little.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

from dllm_engine.structured_output.json_schema import BOUNDS, integer_range

MOST_FIELDS, MOST_CHOICES = 256, 1024
"""Limits on the fields of a decision and on the choices of a field. An integer of a
larger range is a field with a pattern.
"""
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment"}
_OF_OBJECT = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$schema",
    *_ANNOTATIONS,
}
_TYPES = ("string", "number", "integer", "boolean", "null")
"""Types of choices."""
_KINDS = (
    "an enum or const, a boolean, an integer with minimum and maximum, or a string "
    "with a pattern"
)


@dataclass(frozen=True)
class Field:
    name: str
    values: Sequence[Any] | None
    """The field's choices; None: any text of ``schema``."""
    schema: dict[str, Any]
    """Schema of a field with a pattern, or of an integer with a large range."""


def read_fields(schema: Any) -> list[Field]:
    """Fields of a JSON schema of an object, in the order of its properties.

    Raises ``ValueError`` naming the field that a decision cannot have.
    """
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if (
        not isinstance(properties, dict)
        or schema.get("type", "object") != "object"
        or schema.keys() - _OF_OBJECT
    ):
        raise ValueError(
            "fields: give a JSON schema of an object with properties, one for each "
            "field, and no other rules"
        )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(
        isinstance(name, str) for name in required
    ):
        raise ValueError("fields: required is not a list of names of properties")
    if not 1 <= len(properties) <= MOST_FIELDS:
        raise ValueError(
            f"fields: {len(properties)} properties; a decision has 1 … {MOST_FIELDS} "
            f"fields"
        )
    return [_field(name, field_schema) for name, field_schema in properties.items()]


def _field(name: str, schema: Any) -> Field:
    if not isinstance(schema, dict):
        raise ValueError(
            f"fields.{name}: {schema!r} is not a schema of a field, which is {_KINDS}"
        )
    kind, keywords = schema.get("type"), schema.keys() - _ANNOTATIONS - {"type"}
    if keywords in ({"enum"}, {"const"}):
        return Field(
            name,
            _choices(
                name, schema["enum"] if "enum" in keywords else [schema["const"]], kind
            ),
            {},
        )
    if kind == "boolean" and not keywords:
        return Field(name, [True, False], {})
    if (
        kind == "string"
        and keywords == {"pattern"}
        and isinstance(schema["pattern"], str)
    ):
        return Field(name, None, {"type": "string", "pattern": schema["pattern"]})
    if kind == "integer" and keywords and keywords <= {*BOUNDS}:
        return _integer(name, {bound: schema[bound] for bound in keywords})
    shown = json.dumps(
        {key: schema[key] for key in schema if key in keywords or key == "type"},
        ensure_ascii=False,
    )
    raise ValueError(
        f"fields.{name}: {shown[:200]} is not supported; a field is {_KINDS}"
    )


def _choices(name: str, values: Any, kind: Any) -> list[Any]:
    if not isinstance(values, list) or not 1 <= len(values) <= MOST_CHOICES:
        raise ValueError(f"fields.{name}: enum is a list of 1 … {MOST_CHOICES} choices")
    kinds, is_type = (
        kind if isinstance(kind, list) else [kind],
        Draft202012Validator.TYPE_CHECKER.is_type,
    )
    different: dict[str, Any] = {}
    for value in values:
        suits = kind is None or any(
            is_type(value, each) for each in kinds if each in _TYPES
        )
        if isinstance(value, list | dict) or not suits:
            raise ValueError(
                f"fields.{name}: the choice {value!r} is not of type "
                f"{kind or 'text, number or literal'}"
            )
        _check_size(name, value)
        try:
            different[json.dumps(value, allow_nan=False)] = value
        except (TypeError, ValueError):
            raise ValueError(
                f"fields.{name}: the choice {value!r} has no text in JSON"
            ) from None
    return list(different.values())


def _integer(name: str, bounds: dict[str, Any]) -> Field:
    if not all(
        isinstance(bound, int) and not isinstance(bound, bool)
        for bound in bounds.values()
    ):
        raise ValueError(f"fields.{name}: the bounds of an integer are whole numbers")
    for bound in bounds.values():
        _check_size(name, bound)
    low, high = integer_range(bounds)
    if low is None or high is None or low > high:
        raise ValueError(
            f"fields.{name}: give an integer a minimum, and a maximum that is not "
            f"below it"
        )
    if high - low < MOST_CHOICES:
        return Field(name, range(low, high + 1), {})
    return Field(name, None, {"type": "integer", "minimum": low, "maximum": high})


def _check_size(name: str, value: Any) -> None:
    """Refuse an integer that is too large for the engine's messages."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(
            f"fields.{name}: {str(value)[:30]}… has more than 64 bits; make it a text"
        )
