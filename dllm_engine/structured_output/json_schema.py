"""JSON schemas (draft 2020-12) as expressions. Every text of an expression is valid by
the schema, but not every valid text is possible (docs/structured_output.md). A keyword
that is not supported is refused by name."""

from collections.abc import Mapping
from fractions import Fraction
from itertools import combinations
from math import ceil, floor
from typing import Any

from jsonschema import Draft202012Validator, SchemaError

from dllm_engine.structured_output.expression import (
    ANY,
    EMPTY,
    Either,
    Expression,
    Repeated,
    literal,
)
from dllm_engine.structured_output.json_text import (
    INTEGER,
    NUMBER,
    Style,
    decimals,
    string,
)
from dllm_engine.structured_output.python_regex import regex_expression

_EXTRA_DIGITS = 6
"""Limit on the digits of a number beyond those of its bounds."""
_EXACT_DIGITS = 15
"""Decimals with this many digits are distinct, and in order, as Python floats."""
_ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$schema",
    "$comment",
    "$defs",
    "definitions",
    "discriminator",
}
_COMBINING = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref")
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_BY_TYPE: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": BOUNDS,
    "integer": BOUNDS,
    "boolean": (),
    "null": (),
}
_KEYWORDS = {
    "type",
    *_COMBINING,
    *(keyword for names in _BY_TYPE.values() for keyword in names),
}
_DAY = (
    r"(?:(?:0[1-9]\d\d|[1-9]\d{3})-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|"
    r"(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8])))"
)
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_FORMATS = {
    "date": _DAY,
    "date-time": f"{_DAY}T{_CLOCK}",
    "uuid": "[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}",
    "email": r"[a-z0-9]+(?:[._+-][a-z0-9]+)*@[a-z0-9]+(?:-[a-z0-9]+)*(?:\.[a-z0-9]+(?:-[a-z0-9]+)*)+",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
}
"""Regex of each format. There is no 29th of February, and letters are in lower case."""


def schema_expression(schema: Any, style: Style) -> Expression:
    """Expression of a schema. Raises ``ValueError`` naming a value that is not a
    schema, or a keyword that is not supported, and its place.
    """
    try:
        Draft202012Validator.check_schema(schema)
        return _Reader(schema, style).read(schema, "#")
    except SchemaError as error:
        raise ValueError(f"{error.json_path}: {error.message}") from None
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


class _Reader:
    def __init__(self, root: Any, style: Style) -> None:
        self.root = root
        self.style = style
        self.references = ["#"]
        """References that are being read, to detect recursion."""

    def read(
        self, schema: Any, path: str, within: list[str] | None = None
    ) -> Expression:
        """Expression of a schema. ``within``: types that the schema around it allows,
        as in vLLM's schema of a tool call.
        """
        if schema is True and within is None:
            return self.style.anything()
        if not isinstance(schema, dict):
            raise ValueError(f"{path}: {schema!r} is a schema that no value satisfies")
        keywords = schema.keys() - _ANNOTATIONS - ({"$id"} if path == "#" else set())
        if (
            unknown := keywords
            - _KEYWORDS
            - {
                name
                for name in ("uniqueItems", "nullable")
                if schema.get(name) is False
            }
        ):
            raise ValueError(f"{path}: the keyword {min(unknown)!r} is not supported")
        types = self._types(schema, path, within)
        for keyword in _COMBINING:
            if keyword in keywords:
                if (
                    beside := keywords
                    - {keyword}
                    - ({"type"} if keyword not in ("allOf", "$ref") else set())
                ):
                    raise ValueError(
                        f"{path}: {min(beside)!r} beside {keyword!r} is not supported"
                    )
                return self._combined(keyword, schema, types, path)
        if types is None:
            types = [
                name
                for name in _BY_TYPE
                if name != "integer" and keywords.intersection(_BY_TYPE[name])
            ]
        return (
            Either([getattr(self, f"_{name}")(schema, path) for name in types])
            if types
            else self.style.anything()
        )

    def _types(
        self, schema: dict[str, Any], path: str, within: list[str] | None
    ) -> list[str] | None:
        if "type" not in schema:
            return within
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if within is not None and not {*types} <= {*within}:
            raise ValueError(
                f"{path}: 'type' beside schemas of other types is not supported"
            )
        return types

    def _combined(
        self, keyword: str, schema: dict[str, Any], types: list[str] | None, path: str
    ) -> Expression:
        value = schema[keyword]
        place = f"{path}/{keyword}"
        if keyword == "$ref":
            target = self._target(value, place)
            if value in self.references:
                raise ValueError(
                    f"{place}: recursion is not supported ({value!r} refers to itself)"
                )
            self.references.append(value)
            text = self.read(target, value, types)
            self.references.pop()
            return text
        if keyword in ("enum", "const"):
            values = [value] if keyword == "const" else value
            has_type = Draft202012Validator({"type": types or [*_BY_TYPE]}).is_valid
            try:
                return Either([self.style.constant(x) for x in values if has_type(x)])
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
        if keyword == "allOf" and len(value) > 1:
            raise ValueError(f"{place}: more than one schema is not supported")
        texts = [
            self.read(branch, f"{place}/{i}", types) for i, branch in enumerate(value)
        ]
        apart = (
            self._kinds(one).isdisjoint(self._kinds(other))
            for one, other in combinations(value, 2)
        )
        if keyword == "oneOf" and "discriminator" not in schema and not all(apart):
            raise ValueError(
                f"{place}: a value may be valid by two of its schemas; use anyOf, or a "
                f"discriminator (a property that each requires, with another const)"
            )
        return Either(texts)

    def _target(self, reference: Any, path: str) -> Any:
        if not f"{reference}/".startswith("#/"):
            raise ValueError(
                f"{path}: {reference!r} is not supported; only '#/…' is, a place in "
                f"this schema"
            )
        target = self.root
        for part in reference.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or part not in target:
                raise ValueError(f"{path}: there is no {reference!r} in this schema")
            target = target[part]
        return target

    def _kinds(self, schema: Any) -> set[str]:
        """JSON types that a value may have, if the schema or its references name them."""
        if isinstance(schema, dict) and "$ref" in schema:
            schema = self._target(schema["$ref"], "$ref")
        types = self._types(schema, "type", None) if isinstance(schema, dict) else None
        return {"number" if kind == "integer" else kind for kind in types or _BY_TYPE}

    def _object(self, schema: dict[str, Any], path: str) -> Expression:
        fields = schema.get("properties", {})
        required = schema.get("required", [])
        more = schema.get("additionalProperties", True)
        if missing := [name for name in required if name not in fields]:
            raise ValueError(f"{path}/required: {missing[0]!r} is not in properties")
        if not fields and more is not False:
            return self.style.map(self.read(more, f"{path}/additionalProperties"))
        if not isinstance(more, bool):
            self.read(more, f"{path}/additionalProperties")  # read only for its errors
        read = {
            name: self.read(field, f"{path}/properties/{name}")
            for name, field in fields.items()
        }
        return self.style.object(read, required)

    def _array(self, schema: dict[str, Any], path: str) -> Expression:
        minimum = schema.get("minItems", 0)
        maximum = schema.get("maxItems")
        if items := schema.get("prefixItems"):
            if minimum > len(items) or (maximum is not None and maximum < len(items)):
                raise ValueError(
                    f"{path}/prefixItems: only arrays of exactly its {len(items)} "
                    f"items are supported"
                )
            return self.style.tuple(
                [
                    self.read(item, f"{path}/prefixItems/{i}")
                    for i, item in enumerate(items)
                ]
            )
        item = (
            EMPTY
            if maximum == 0
            else self.read(schema.get("items", True), f"{path}/items")
        )
        return self.style.array(item, minimum, maximum)

    def _string(self, schema: dict[str, Any], path: str) -> Expression:
        keywords = [
            keyword
            for keyword in ("pattern", "format", "minLength", "maxLength")
            if keyword in schema
        ]
        if not {"pattern", "format"}.intersection(keywords):
            return string(
                Repeated(ANY, schema.get("minLength", 0), schema.get("maxLength"))
            )
        if keywords[1:]:
            raise ValueError(
                f"{path}: {keywords[1]!r} beside {keywords[0]!r} is not supported; write it "
                f"into a pattern"
            )
        value = schema[keywords[0]]
        place = f"{path}/{keywords[0]}"
        is_pattern = keywords == ["pattern"]
        if not is_pattern and value not in _FORMATS:
            raise ValueError(f"{place}: {value!r} is none of {', '.join(_FORMATS)}")
        try:
            return string(
                regex_expression(
                    value if is_pattern else f"(?a){_FORMATS[value]}", search=is_pattern
                )
            )
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None

    def _number(self, schema: dict[str, Any], path: str) -> Expression:
        """Numbers; with bounds, decimals without exponent."""
        bounds = _bounds(schema)
        exact = (
            n
            for n in range(_EXACT_DIGITS)
            if all(10**n % bound.denominator == 0 for bound in bounds.values())
        )
        num_digits = next(exact, _EXACT_DIGITS) + _EXTRA_DIGITS
        if any(
            abs(bound) * 10**num_digits >= 10**_EXACT_DIGITS
            for bound in bounds.values()
        ):
            raise ValueError(
                f"{path}: a bound of a number may have {_EXACT_DIGITS - _EXTRA_DIGITS} "
                f"digits at most"
            )
        return (
            Either([_bounded(bounds, n) for n in range(num_digits + 1)])
            if bounds
            else NUMBER
        )

    def _integer(self, schema: dict[str, Any], path: str) -> Expression:
        bounds = _bounds(schema)
        return _bounded(bounds, 0) if bounds else INTEGER

    def _boolean(self, schema: dict[str, Any], path: str) -> Expression:
        return Either([literal("true"), literal("false")])

    def _null(self, schema: dict[str, Any], path: str) -> Expression:
        return literal("null")


def _bounds(schema: dict[str, Any]) -> dict[str, Fraction]:
    return {
        keyword: Fraction(str(schema[keyword]))
        for keyword in BOUNDS
        if keyword in schema
    }


def _bounded(bounds: dict[str, Fraction], places: int) -> Expression:
    """Decimals within bounds, with this number of digits behind the point."""
    return decimals(
        *integer_range(
            {keyword: bound * 10**places for keyword, bound in bounds.items()}
        ),
        places,
    )


def integer_range(
    bounds: Mapping[str, Fraction | int],
) -> tuple[int | None, int | None]:
    """The smallest and the largest integer within bounds, by their keywords; None if
    there is no bound.
    """
    lows = [ceil(bounds[key]) for key in bounds if key == "minimum"]
    lows += [floor(bounds[key]) + 1 for key in bounds if key == "exclusiveMinimum"]
    highs = [floor(bounds[key]) for key in bounds if key == "maximum"]
    highs += [ceil(bounds[key]) - 1 for key in bounds if key == "exclusiveMaximum"]
    return max(lows, default=None), min(highs, default=None)
