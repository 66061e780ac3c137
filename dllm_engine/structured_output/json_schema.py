"""JSON schemas (draft 2020-12) as expressions: every text is valid by the schema, and a keyword that cannot be held to
is refused by name. Not every valid text is there: properties come in the order of the schema, and others than the
listed are never written."""

from fractions import Fraction
from itertools import combinations
from typing import Any

from dllm_engine.structured_output.expression import EMPTY, Expression, either, literal, widths
from dllm_engine.structured_output.json_text import NUMBER, Style, any_string, constant, decimal, integer, string
from dllm_engine.structured_output.python_regex import regex_expression

_MOST_PLACES = 10_000
"""Schemas in a schema, counted as often as they are referred to."""
_MOST_DIGITS = 400
"""Most digits of a bound; a float has fewer."""
_ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$comment"),
    *("$defs", "definitions", "discriminator"),
}
_COMBINING = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref")
_BY_TYPE: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "boolean": (),
    "null": (),
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
"""Texts of each format: days without the 29th of February, letters in lower case."""


def schema_expression(schema: Any, style: Style) -> Expression:
    """Raises ``ValueError`` naming a keyword that is not supported, and where."""
    try:
        return _Reader(schema, style).read(schema, "#")
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


class _Reader:
    def __init__(self, root: Any, style: Style) -> None:
        self.root, self.style = root, style
        self.references: list[str] = []
        self.places = 0

    def read(self, schema: Any, path: str) -> Expression:
        self.places += 1
        if self.places > _MOST_PLACES:
            raise ValueError(f"it holds over {_MOST_PLACES} schemas, counted where they are referred to")
        if schema is True:
            return self.style.anything()
        if not isinstance(schema, dict):
            raise ValueError(f"{path}: {schema!r} is no schema that any value is valid by")
        told = schema.keys() - _ANNOTATIONS
        if path == "#":
            told -= {"$id"}
        unknown = told - {"type", *_COMBINING, *(keyword for names in _BY_TYPE.values() for keyword in names)}
        unknown -= {name for name in ("uniqueItems", "nullable") if schema.get(name) is False}
        if unknown:
            raise ValueError(f"{path}: the keyword {min(unknown)!r} is not supported")
        types = self._types(schema, path)
        combining = [keyword for keyword in _COMBINING if keyword in told]
        if combining:
            return self._combined(combining[0], schema, told, types, path)
        if types is None:
            types = [name for name in _BY_TYPE if name != "integer" and told.intersection(_BY_TYPE[name])]
            if not types:
                return self.style.anything()
        return either([getattr(self, f"_{name}")(schema, path) for name in types])

    def _types(self, schema: dict[str, Any], path: str) -> list[str] | None:
        if "type" not in schema:
            return None
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not types or any(not isinstance(name, str) or name not in _BY_TYPE for name in types):
            raise ValueError(f"{path}/type: {schema['type']!r} is none of {', '.join(_BY_TYPE)}")
        return list(types)

    def _combined(
        self, keyword: str, schema: dict[str, Any], told: set[str], types: list[str] | None, path: str
    ) -> Expression:
        value, here = schema[keyword], f"{path}/{keyword}"
        beside = told - {keyword, "type"} if keyword in ("enum", "const", "anyOf", "oneOf") else told - {keyword}
        if beside:
            raise ValueError(f"{path}: {min(beside)!r} beside {keyword!r} is not supported")
        if keyword in ("enum", "const"):
            values = [value] if keyword == "const" else self._list(value, here)
            if types is not None:
                values = [item for item in values if any(_is(item, name) for name in types)]
            try:
                return either([constant(item, self.style) for item in values])
            except ValueError as error:
                raise ValueError(f"{here}: {error}") from None
        if keyword == "$ref":
            return self._referred(value, here)
        branches = self._list(value, here)
        if keyword == "allOf" and len(branches) > 1:
            raise ValueError(f"{here}: more than one schema is not supported")
        if types is not None:
            branches = [self._narrowed(branch, types, f"{here}/{i}") for i, branch in enumerate(branches)]
        texts = [self.read(branch, f"{here}/{i}") for i, branch in enumerate(branches)]
        if keyword == "oneOf" and not self._are_apart(list(map(self._resolved, branches))):
            raise ValueError(
                f"{here}: a value may be valid by two of its schemas; use anyOf, or a required property with another "
                "const in each"
            )
        return either(texts)

    def _narrowed(self, branch: Any, types: list[str], path: str) -> Any:
        """A branch of a schema that has a ``type`` of its own, as vLLM's schema of a tool's call."""
        own = self._types(self._resolved(branch), path)
        if own is not None and set(own) <= set(types):
            return branch
        if own is not None or not isinstance(branch, dict) or branch.keys() & {*_COMBINING}:
            raise ValueError(f"{path}: 'type' beside schemas of other types is not supported")
        return branch | {"type": types}

    def _list(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise ValueError(f"{path}: {value!r} is no list with an entry")
        return value

    def _referred(self, reference: Any, path: str) -> Expression:
        if reference in self.references:
            raise ValueError(f"{path}: recursion is not supported ({reference!r} refers to itself)")
        target = self._target(reference, path)
        self.references.append(reference)
        read = self.read(target, reference)
        self.references.pop()
        return read

    def _target(self, reference: Any, path: str) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise ValueError(f"{path}: {reference!r} is not supported; only '#/…' is, a place in this schema")
        if reference == "#":
            raise ValueError(f"{path}: recursion is not supported ('#' refers to itself)")
        found = self.root
        for part in reference[2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or part not in found:
                raise ValueError(f"{path}: there is no {reference!r} in this schema")
            found = found[part]
        return found

    def _resolved(self, schema: Any) -> dict[str, Any]:
        for _ in range(8):
            if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
                schema = self._target(schema["$ref"], "$ref")
        return schema if isinstance(schema, dict) else {}

    def _are_apart(self, schemas: list[dict[str, Any]]) -> bool:
        """Return True if it is clear that no value is valid by two of them."""
        listed = [schema for schema in schemas if _values(schema) is not None]
        others = [schema for schema in schemas if _values(schema) is None]
        kinds: set[str] = set().union(*map(self._kinds, listed))
        return (
            _are_disjoint(listed)
            and not any(kinds & self._kinds(schema) for schema in others if listed)
            and all(self._kinds(schema) for schema in others if len(schemas) > 1)
            and all(self._pair_is_apart(*pair) for pair in combinations(others, 2))
        )

    def _pair_is_apart(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        if not self._kinds(one) & self._kinds(other):
            return True
        if self._kinds(one) | self._kinds(other) != {"object"}:
            return False
        shared = {*one.get("required", ())} & {*other.get("required", ())}
        return any(
            _are_disjoint([self._resolved(side["properties"][name]) for side in (one, other)]) for name in shared
        )

    def _kinds(self, schema: dict[str, Any]) -> set[str]:
        """Types of JSON that a value may have; none where that is not plain."""
        values, types = _values(schema), self._types(schema, "type")
        if types is None:
            types = [kind for kind in _BY_TYPE for value in values or () if _is(value, kind)]
        return {"number" if kind == "integer" else kind for kind in types}

    def _object(self, schema: dict[str, Any], path: str) -> Expression:
        fields, required = schema.get("properties", {}), schema.get("required", [])
        more = schema.get("additionalProperties", True)
        if not isinstance(fields, dict) or not isinstance(required, list):
            raise ValueError(f"{path}: properties must be an object, required a list")
        if not all(isinstance(name, str) for name in required):
            raise ValueError(f"{path}/required: {required!r} are no names")
        missing = [name for name in required if name not in fields]
        if missing:
            raise ValueError(f"{path}/required: {missing[0]!r} is not in properties")
        if not fields and more is not False:
            return self.style.map(self.read(more, f"{path}/additionalProperties"))
        if fields and not isinstance(more, bool):
            self.read(more, f"{path}/additionalProperties")  # never written, but named where it is wrong
        read = {name: self.read(field, f"{path}/properties/{name}") for name, field in fields.items()}
        return self.style.object(read, set(required))

    def _array(self, schema: dict[str, Any], path: str) -> Expression:
        least, most = self._count(schema, "minItems", path) or 0, self._count(schema, "maxItems", path)
        if "prefixItems" in schema:
            items = self._list(schema["prefixItems"], f"{path}/prefixItems")
            if least > len(items) or (most is not None and most < len(items)):
                raise ValueError(f"{path}/prefixItems: only arrays of exactly its {len(items)} items are supported")
            return self.style.tuple([self.read(item, f"{path}/prefixItems/{i}") for i, item in enumerate(items)])
        item = EMPTY if most == 0 else self.read(schema.get("items", True), f"{path}/items")
        return self.style.array(item, least, most)

    def _string(self, schema: dict[str, Any], path: str) -> Expression:
        least, most = self._count(schema, "minLength", path) or 0, self._count(schema, "maxLength", path)
        told = [keyword for keyword in ("pattern", "format") if keyword in schema]
        if not told:
            return any_string(least, most)
        if len(told) == 2:
            raise ValueError(f"{path}: 'format' beside 'pattern' is not supported")
        value, here = schema[told[0]], f"{path}/{told[0]}"
        if not isinstance(value, str):
            raise ValueError(f"{here}: {value!r} is no text")
        if told == ["format"] and value not in _FORMATS:
            raise ValueError(f"{here}: {value!r} is none of {', '.join(_FORMATS)}")
        try:
            content = regex_expression(
                f"(?a){_FORMATS[value]}" if told == ["format"] else value, search=told == ["pattern"]
            )
        except ValueError as error:
            raise ValueError(f"{here}: {error}") from None
        shortest, longest = widths(content)
        if shortest < least or (most is not None and (longest is None or longest > most)):
            raise ValueError(
                f"{path}: {told[0]!r} beside 'minLength' or 'maxLength' is supported only where all that "
                f"it matches is as long; write the length into a pattern, as in '^[a-z]{{2,8}}$'"
            )
        return string(content)

    def _number(self, schema: dict[str, Any], path: str) -> Expression:
        low, high, above, below = self._bounds(schema, path)
        if low is None and high is None:
            return NUMBER
        try:
            return decimal(low, high, above, below)
        except ValueError as error:
            raise ValueError(f"{path}: a bound of a number is not supported: {error}") from None

    def _integer(self, schema: dict[str, Any], path: str) -> Expression:
        low, high, above, below = self._bounds(schema, path)
        smallest = None if low is None else low // 1 + 1 if above else -(-low // 1)
        largest = None if high is None else -(-high // 1) - 1 if below else high // 1
        return integer(smallest, largest)

    def _boolean(self, schema: dict[str, Any], path: str) -> Expression:
        return either([literal("true"), literal("false")])

    def _null(self, schema: dict[str, Any], path: str) -> Expression:
        return literal("null")

    def _bounds(self, schema: dict[str, Any], path: str) -> tuple[Fraction | None, Fraction | None, bool, bool]:
        """Lowest and highest value, and whether these are left out."""
        low, low_out = self._bound(schema, "minimum", path), self._bound(schema, "exclusiveMinimum", path)
        high, high_out = self._bound(schema, "maximum", path), self._bound(schema, "exclusiveMaximum", path)
        above = low_out is not None and (low is None or low_out >= low)
        below = high_out is not None and (high is None or high_out <= high)
        return low_out if above else low, high_out if below else high, above, below

    def _bound(self, schema: dict[str, Any], keyword: str, path: str) -> Fraction | None:
        value: Any = schema.get(keyword)
        if value is None and keyword not in schema:
            return None
        if not _is(value, "number") or value in (float("inf"), -float("inf")) or value != value:
            raise ValueError(f"{path}/{keyword}: {value!r} is no number")
        if abs(value) >= 10**_MOST_DIGITS:
            raise ValueError(f"{path}/{keyword}: a bound may have {_MOST_DIGITS} digits at most")
        return Fraction(str(value))

    def _count(self, schema: dict[str, Any], keyword: str, path: str) -> int | None:
        value = schema.get(keyword)
        if keyword in schema and (type(value) is not int or value < 0):
            raise ValueError(f"{path}/{keyword}: {value!r} is no count")
        return value


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "integer":
            return _is(value, "number") and value == value // 1
    return type(value) is {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}[kind]


def _are_disjoint(schemas: list[dict[str, Any]]) -> bool:
    """Return True if all schemas allow listed values only, and no value is in two lists."""
    seen: set[object] = set()
    for schema in schemas:
        if (values := _values(schema)) is None:
            return False
        hashable = set(map(_hashable, values))
        if hashable & seen:
            return False
        seen |= hashable
    return True


def _hashable(value: Any) -> object:
    """Equal where the values are."""
    match value:
        case dict():
            return frozenset((name, _hashable(item)) for name, item in value.items())
        case list():
            return tuple(map(_hashable, value))
    return value


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """All that ``const`` or ``enum`` allow."""
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")
