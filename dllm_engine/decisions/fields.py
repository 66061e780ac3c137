"""Fields of a decision, from a JSON schema or from Python objects."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.structured_output.json_schema import BOUNDS, integer_range

MOST_FIELDS, MOST_CHOICES = 256, 1024
"""Limits of one decision, and of one field. An integer of a larger range is a field of a pattern."""
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment"}
_OF_OBJECT = {"type", "properties", "required", "additionalProperties", "$schema", *_ANNOTATIONS}
_TYPES = ("string", "number", "integer", "boolean", "null")
"""Types of choices."""
_KINDS = "an enum or const, a boolean, an integer with minimum and maximum, or a string with a pattern"


@dataclass(frozen=True)
class Field:
    name: str
    values: list[Any] | None
    """Its choices; None: any text of ``schema``."""
    schema: dict[str, Any]
    """Schema of a pattern, or of an integer of a large range."""


def read_fields(schema: Any) -> list[Field]:
    """Fields of a JSON schema of an object, in the order of its properties.

    Raises ``InvalidRequestError`` naming the field that a decision cannot have.
    """
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or schema.get("type", "object") != "object" or schema.keys() - _OF_OBJECT:
        raise InvalidRequestError(
            "fields: give a JSON schema of an object with properties, one for each field, and no other rules"
        )
    if not 1 <= len(properties) <= MOST_FIELDS:
        raise InvalidRequestError(f"fields: {len(properties)} properties; a decision has 1 … {MOST_FIELDS} fields")
    return [_field(name, given) for name, given in properties.items()]


def schema_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of fields in Python: ``bool``, a ``range``, a compiled regular expression that the whole value
    matches, a list of choices, or a schema. A schema of all fields stays as it is."""
    if fields.get("type") == "object" and isinstance(fields.get("properties"), dict):
        return dict(fields)
    properties = {name: _property(name, given) for name, given in fields.items()}
    return {"type": "object", "properties": properties, "required": [*properties]}


def _property(name: str, given: Any) -> dict[str, Any]:
    match given:
        case dict():
            return given
        case type() if given is bool:
            return {"type": "boolean"}
        case range() if given.step == 1 and len(given):
            return {"type": "integer", "minimum": given.start, "maximum": given.stop - 1}
        case re.Pattern() if isinstance(given.pattern, str) and given.flags == re.UNICODE:
            return {"type": "string", "pattern": f"^(?:{given.pattern})$"}
        case list() | tuple() | range() if len(given):
            return {"enum": list(given)}
    raise InvalidRequestError(
        f"fields.{name}={given!r}: give bool, a range, a compiled regular expression without flags, a list of "
        "choices, or a JSON schema"
    )


def _field(name: str, schema: Any) -> Field:
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"fields.{name}: {schema!r} is no schema of a field, which is {_KINDS}")
    kind, keywords = schema.get("type"), schema.keys() - _ANNOTATIONS - {"type"}
    if keywords in ({"enum"}, {"const"}):
        return Field(name, _choices(name, schema["enum"] if "enum" in keywords else [schema["const"]], kind), {})
    if kind == "boolean" and not keywords:
        return Field(name, [True, False], {})
    if kind == "string" and keywords == {"pattern"} and isinstance(schema["pattern"], str):
        return Field(name, None, {"type": "string", "pattern": schema["pattern"]})
    if kind == "integer" and keywords and keywords <= {*BOUNDS}:
        return _integer(name, {bound: schema[bound] for bound in keywords})
    shown = json.dumps({key: schema[key] for key in schema if key in keywords or key == "type"}, ensure_ascii=False)
    raise InvalidRequestError(f"fields.{name}: {shown[:200]} is not supported; a field is {_KINDS}")


def _choices(name: str, values: Any, kind: Any) -> list[Any]:
    if not isinstance(values, list) or not 1 <= len(values) <= MOST_CHOICES:
        raise InvalidRequestError(f"fields.{name}: enum is a list of 1 … {MOST_CHOICES} choices")
    kinds, is_type = kind if isinstance(kind, list) else [kind], Draft202012Validator.TYPE_CHECKER.is_type
    different: dict[str, Any] = {}
    for value in values:
        suits = kind is None or any(is_type(value, each) for each in kinds if each in _TYPES)
        if isinstance(value, list | dict) or not suits:
            raise InvalidRequestError(f"fields.{name}: the choice {value!r} is no {kind or 'text, number or literal'}")
        try:
            different[json.dumps(value, allow_nan=False)] = value
        except (TypeError, ValueError):
            raise InvalidRequestError(f"fields.{name}: the choice {value!r} has no text in JSON") from None
    return list(different.values())


def _integer(name: str, bounds: dict[str, Any]) -> Field:
    if not all(isinstance(bound, int) and not isinstance(bound, bool) for bound in bounds.values()):
        raise InvalidRequestError(f"fields.{name}: the bounds of an integer are whole numbers")
    low, high = integer_range(bounds)
    if low is None or high is None or low > high:
        raise InvalidRequestError(f"fields.{name}: give an integer a minimum, and a maximum that is not below it")
    if high - low < MOST_CHOICES:
        return Field(name, list(range(low, high + 1)), {})
    return Field(name, None, {"type": "integer", "minimum": low, "maximum": high})
