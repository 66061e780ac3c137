import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from dllm_engine.structured_output.json_schema import schema_expression
from dllm_engine.structured_output.json_text import OBJECT_DEPTH, VALUE_DEPTH, Style
from tests.support.automaton_walks import TOKENS, accepts, built, segmented, walk

TEXTS = st.text(st.sampled_from('ab"\\/\n\té你😀 \x7f'), max_size=5)
FORMATS = ("date", "date-time", "uuid", "email", "ipv4")
Pair = tuple[object, st.SearchStrategy[object]]


@st.composite
def bounds(draw, low: int, high: int) -> tuple[int | None, int | None]:
    values = sorted(draw(st.tuples(st.integers(low, high), st.integers(low, high))))
    return draw(
        st.sampled_from(
            [(None, None), (values[0], None), (None, values[1]), (values[0], values[1])]
        )
    )


@st.composite
def scalars(draw) -> Pair:
    kind = draw(
        st.sampled_from(
            "string integer number enum const pattern true boolean types".split()
        )
    )
    if kind == "string":
        least, most = draw(bounds(0, 5))
        told = {"minLength": least, "maxLength": most}
        return {"type": kind, **_told(told)}, st.text(
            st.sampled_from('a"\\é😀\n'), min_size=least or 0, max_size=most
        )
    if kind == "integer":
        low, high = draw(bounds(-250, 1200))
        return {"type": kind, **_told({"minimum": low, "maximum": high})}, st.integers(
            low, high
        )
    if kind == "number":
        low, high = draw(bounds(-250, 1200))
        scale = draw(st.sampled_from([1, 10, 1000]))
        told = {"minimum": low and low / scale, "maximum": high and high / scale}
        within = st.integers(
            -300 if low is None else low, max(1300, low or 0) if high is None else high
        )
        return {"type": kind, **_told(told)}, within.map(lambda value: value / scale)
    if kind == "enum":
        value = st.one_of(TEXTS, st.integers(), st.none(), st.lists(TEXTS, max_size=2))
        values = draw(st.lists(value, min_size=1, max_size=4))
        return {"enum": values}, st.sampled_from(values)
    if kind == "const":
        value = draw(
            st.dictionaries(
                TEXTS, st.floats(allow_nan=False, allow_infinity=False), max_size=2
            )
        )
        return {"const": value}, st.just(value)
    if kind == "pattern":
        return {"type": "string", "pattern": '^a["\\\\é]{1,2}|b$'}, st.sampled_from(
            ['a"', "aé\\", '\t"b', "ab"]
        )
    if kind == "types":
        return {"type": ["boolean", "null"]}, st.sampled_from([True, False, None])
    if kind == "boolean":
        return {"type": kind, "title": "x"}, st.booleans()
    return True, st.one_of(
        st.none(), TEXTS, st.lists(st.lists(st.integers(), max_size=2), max_size=2)
    )


@st.composite
def schemas(draw, depth: int = 3) -> Pair:
    kind = (
        draw(
            st.sampled_from(
                ["scalar", "object", "object", "array", "map", "tuple", "any"]
            )
        )
        if depth
        else "scalar"
    )
    inner = schemas(depth - 1)
    if kind == "object":
        names = draw(st.lists(TEXTS, unique=True, max_size=4))
        fields = {name: draw(inner) for name in names}
        required = [name for name in names if draw(st.booleans())]
        more = (
            {"additionalProperties": False} if not names or draw(st.booleans()) else {}
        )
        schema = {
            "type": "object",
            "properties": {name: field[0] for name, field in fields.items()},
            **more,
        }
        values = st.fixed_dictionaries({}).flatmap(lambda _: _fields(fields, required))
        return {**schema, "required": required}, values
    if kind == "array":
        item, values = draw(inner)
        least, most = draw(bounds(0, 3))
        told = _told({"minItems": least, "maxItems": most})
        most = max(4, least or 0) if most is None else most
        return {"type": "array", "items": item, **told}, st.lists(
            values, min_size=least or 0, max_size=most
        )
    if kind == "map":
        item, values = draw(inner)
        return {"type": "object", "additionalProperties": item}, st.dictionaries(
            TEXTS, values, max_size=2
        )
    if kind == "tuple":
        items, parts = zip(*(draw(inner) for _ in range(2)), strict=True)
        return {"type": "array", "prefixItems": [*items]}, st.tuples(*parts).map(list)
    if kind == "any":
        branches, parts = zip(*(draw(inner) for _ in range(2)), strict=True)
        return {"anyOf": [*branches]}, st.one_of(*parts)
    return draw(scalars())


@st.composite
def _fields(draw, fields: dict[str, Pair], required: list[str]) -> dict[str, object]:
    return {
        name: draw(field[1])
        for name, field in fields.items()
        if name in required or draw(st.booleans())
    }


def _told(keywords: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in keywords.items() if value is not None}


def of_schema(schema: object, spaces: bool = True):
    return built("json", json.dumps(schema), spaces=spaces, max_states=100_000)


@settings(max_examples=25, deadline=None)
@given(schemas(), st.randoms(use_true_random=False))
def test_accepted_texts_are_valid(drawn, choice):
    schema, _ = drawn
    automaton = of_schema(schema)
    for _ in range(4):
        text = walk(automaton, TOKENS, choice, choice.choice([0, 20, 60])).decode()
        Draft202012Validator(schema).validate(json.loads(text))


@settings(max_examples=25, deadline=None)
@given(schemas(), st.data(), st.randoms(use_true_random=False))
def test_valid_values_are_accepted(drawn, data, choice):
    schema, values = drawn
    value = data.draw(values)
    for spaces, separators in (
        (True, (", ", ": ")),
        (True, (",", ":")),
        (False, (",", ":")),
    ):
        text = json.dumps(value, ensure_ascii=False, separators=separators)
        if json.loads(text) == value:
            assert accepts(
                of_schema(schema, spaces), segmented(text.encode(), TOKENS, choice)
            ), text


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    schema = {"type": "string", "format": name}
    automaton, choice = of_schema(schema), random.Random(0)
    for _ in range(50):
        text = walk(automaton, TOKENS, choice, 30).decode()
        Draft202012Validator(schema, format_checker=FormatChecker()).validate(
            json.loads(text)
        )


@pytest.mark.parametrize(
    "told",
    [
        {"exclusiveMinimum": 0},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 1.5},
        {"exclusiveMinimum": -0.25, "maximum": 0.5},
        {"minimum": 99.95},
        {"exclusiveMaximum": -3},
        {"minimum": 1, "exclusiveMinimum": 0.5},
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_of_numbers(kind, told):
    schema = {"type": kind, **told}
    validator = Draft202012Validator(schema)
    automaton = of_schema(schema)
    choice = random.Random(0)
    for _ in range(100):
        validator.validate(json.loads(walk(automaton, TOKENS, choice, 12)))
    for hundredths in range(-500, 12_000):
        text = json.dumps(hundredths // 100 if kind == "integer" else hundredths / 100)
        assert accepts(automaton, list(text.encode())) == validator.is_valid(
            json.loads(text)
        ), text


def nested(depth: int) -> bytes:
    return b'{"a": ' * (depth - 1) + b"{}" + b"}" * (depth - 1)


def test_any_object():
    automaton = built("json_object", "")
    choice = random.Random(0)
    for _ in range(20):
        assert isinstance(json.loads(walk(automaton, TOKENS, choice, 60)), dict)
    assert accepts(automaton, list(nested(OBJECT_DEPTH)))
    assert not accepts(automaton, list(nested(OBJECT_DEPTH + 1)))
    assert not accepts(automaton, list(b"[]"))
    anything = of_schema({})
    assert accepts(anything, list(nested(VALUE_DEPTH)))
    assert not accepts(anything, list(nested(VALUE_DEPTH + 1)))


def test_references_and_discriminated_objects():
    cat = {
        "properties": {"kind": {"const": "cat"}, "lives": {"$ref": "#/$defs/count"}},
        "required": ["kind"],
    }
    dog = {"properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
    cat["type"] = dog["type"] = "object"
    schema = {
        "$defs": {
            "cat": cat,
            "a/b": dog,
            "count": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/a~1b"}],
        "discriminator": {"propertyName": "kind"},
    }
    automaton = of_schema(schema)
    assert accepts(automaton, list(b'{"kind": "cat", "lives": 9}'))
    assert accepts(automaton, list(b'{"kind":"wolf"}'))
    assert not accepts(automaton, list(b'{"kind": "dog", "lives": 9}'))
    assert accepts(
        without_spaces := of_schema(schema, spaces=False), list(b'{"kind":"wolf"}')
    )
    assert not accepts(without_spaces, list(b'{"kind": "wolf"}'))


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (False, "#: False is a schema that no value satisfies"),
        ({"type": "strin"}, "$.type: 'strin' is not valid"),
        (
            {"properties": {"a": {"minLength": None}}},
            "$.properties.a.minLength: None is not of type 'integer'",
        ),
        (
            {"type": "array", "items": {"type": "integer", "multipleOf": 2}},
            "#/items: the keyword 'multipleOf'",
        ),
        (
            {"type": "object", "properties": {"a": {"x-own": {}}}},
            "#/properties/a: the keyword 'x-own'",
        ),
        ({"$ref": "#"}, "recursion"),
        (
            {
                "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}},
                "$ref": "#/$defs/a",
            },
            "'#/$defs/a' refers",
        ),
        ({"$ref": "https://example.com/schema"}, "only '#/…' is"),
        ({"$ref": "#/$defs/b"}, "there is no"),
        ({"allOf": [{}, {}]}, "#/allOf: more than one schema"),
        ({"anyOf": []}, "$.anyOf: [] should be non-empty"),
        (
            {"anyOf": [{"type": "string"}], "type": "object"},
            "'type' beside schemas of other types",
        ),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "#/oneOf: a value may be valid by two",
        ),
        (
            {"oneOf": [{"type": "object"}, {"type": "object"}]},
            "#/oneOf: a value may be valid by two",
        ),
        ({"enum": [1], "minimum": 0}, "'minimum' beside 'enum'"),
        ({"enum": [float("nan")]}, "#/enum: "),
        ({"type": "object", "required": ["a"]}, "#/required: 'a' is not in properties"),
        ({"type": "string", "pattern": "(?=a)"}, "#/pattern: look-around"),
        (
            {"type": "string", "pattern": "a", "maxLength": 5},
            "'maxLength' beside 'pattern'",
        ),
        (
            {"type": "string", "pattern": "a", "format": "date"},
            "'format' beside 'pattern'",
        ),
        (
            {"type": "string", "format": "hostname"},
            "#/format: 'hostname' is none of date",
        ),
        ({"type": "array", "prefixItems": [{}], "minItems": 2}, "exactly its 1 items"),
        ({"type": "array", "items": [{}]}, "$.items: [{}] is not of type"),
        ({"type": "number", "minimum": 1e300}, "9 digits"),
    ],
)
def test_refused(schema, named):
    with pytest.raises(ValueError) as refused:
        schema_expression(schema, Style())
    assert named in str(refused.value)
