"""JSON texts as expressions (docs/structured_output.md)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dllm_engine.structured_output.expression import (
    ANY,
    LAST_CODE_POINT,
    Chars,
    Either,
    Expression,
    Listed,
    Repeated,
    literal,
    one_of,
    optional,
)

OBJECT_DEPTH = 4
"""Nesting depth of any JSON object, including itself."""
VALUE_DEPTH = 2
"""Nesting depth of a value that a schema does not describe."""
_ESCAPES = {
    '"': '"',
    "\\": "\\",
    "/": "/",
    "\b": "b",
    "\f": "f",
    "\n": "n",
    "\r": "r",
    "\t": "t",
}
_PLAIN = ((0x20, 0x21), (0x23, 0x5B), (0x5D, LAST_CODE_POINT))
"""Characters that a string holds unescaped: all but control characters, quotes and
backslashes.
"""
_DIGIT = one_of("0123456789")
INTEGER = (
    optional(literal("-")),
    Either((literal("0"), (one_of("123456789"), Repeated(_DIGIT, 0, None)))),
)
NUMBER = (
    INTEGER,
    optional((literal("."), Repeated(_DIGIT, 1, None))),
    optional((one_of("eE"), optional(one_of("+-")), Repeated(_DIGIT, 1, 2))),
)


def in_string(expression: Expression) -> Expression:
    """Expression in the spelling of a JSON string."""
    match expression:
        case Chars(ranges):
            plain = (
                (max(a, first), min(b, last))
                for a, b in ranges
                for first, last in _PLAIN
            )
            holds = [
                letter
                for char, letter in _ESCAPES.items()
                if any(a <= ord(char) <= b for a, b in ranges)
            ]
            return Either((Chars(tuple(plain)), (one_of("\\"), one_of("".join(holds)))))
        case tuple():
            return tuple(map(in_string, expression))
        case Either(branches):
            return Either(list(map(in_string, branches)))
        case Repeated(item, minimum, maximum):
            return Repeated(in_string(item), minimum, maximum)
    raise TypeError(expression)


def string(content: Expression) -> Expression:
    return (literal('"'), in_string(content), literal('"'))


ANY_STRING = string(Repeated(ANY, 0, None))


@dataclass(frozen=True)
class Style:
    """Separators in JSON texts."""

    spaces: bool = True
    """Allow a space behind a comma and a colon."""

    def mark(self, character: str) -> Expression:
        return (
            (literal(character), optional(literal(" ")))
            if self.spaces
            else literal(character)
        )

    def array(
        self, item: Expression, minimum: int = 0, maximum: int | None = None
    ) -> Expression:
        return (
            literal("["),
            Repeated(item, minimum, maximum, self.mark(",")),
            literal("]"),
        )

    def tuple(self, items: list[Expression]) -> Expression:
        return (
            literal("["),
            Listed([(item, True) for item in items], self.mark(",")),
            literal("]"),
        )

    def object(self, fields: dict[str, Expression], required: list[str]) -> Expression:
        colon = self.mark(":")
        items = [
            ((self.constant(name), colon, value), name in required)
            for name, value in fields.items()
        ]
        return (literal("{"), Listed(items, self.mark(",")), literal("}"))

    def map(self, value: Expression) -> Expression:
        """An object with any keys."""
        return (
            literal("{"),
            Repeated((ANY_STRING, self.mark(":"), value), 0, None, self.mark(",")),
            literal("}"),
        )

    def anything(self, depth: int = VALUE_DEPTH) -> Expression:
        """Any value with up to ``depth`` nested objects and arrays."""
        values = [ANY_STRING, NUMBER, *map(literal, ("true", "false", "null"))]
        if depth:
            values += [
                self.array(self.anything(depth - 1)),
                self.map(self.anything(depth - 1)),
            ]
        return Either(values)

    def constant(self, value: Any) -> Expression:
        """The text of a value. Raises ``ValueError`` for a value that JSON cannot
        express.
        """
        if isinstance(value, list):
            return self.tuple(list(map(self.constant, value)))
        if isinstance(value, dict):
            return self.object(
                {name: self.constant(item) for name, item in value.items()}, list(value)
            )
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # a lone surrogate cannot be encoded
        return literal(text)


def decimals(low: int | None, high: int | None, places: int) -> Expression:
    """Numbers n / 10^places with ``places`` digits behind the point, for integers n
    from ``low`` to ``high``; None: no bound."""
    texts: list[tuple[Expression, ...]] = []
    if high is None or high >= 0:
        texts += _naturals(max(low or 0, 0), high, places)
    if low is None or low < 0:
        least = 1 if high is None else max(1, -high)
        texts += (
            (literal("-"), *text)
            for text in _naturals(least, None if low is None else -low, places)
        )
    return Either(
        [
            (*text[:-places], literal("."), *text[-places:]) if places else text
            for text in texts
        ]
    )


def _naturals(
    low: int, high: int | None, places: int
) -> Iterator[tuple[Expression, ...]]:
    """Digits of integers, with at least one digit before the last ``places``."""
    length = max(len(str(low)), places + 1)
    if high is None:
        yield (
            one_of("123456789"),
            Repeated(_DIGIT, length - places, None),
            *[_DIGIT] * places,
        )
        high = 10**length - 1
    while low <= high:
        top = min(high, 10**length - 1)
        yield from _between(str(low).zfill(length), str(top).zfill(length))
        low = top + 1
        length = length + 1


def _between(low: str, high: str) -> Iterator[tuple[Expression, ...]]:
    """Digits of numbers from ``low`` to ``high``, which have equally many digits."""
    if set(low) <= {"0"} and set(high) <= {"9"}:
        yield (_DIGIT,) * len(low)
        return
    first, last, rest = low[0], high[0], len(low) - 1
    if first == last:
        yield from ((one_of(first), *digits) for digits in _between(low[1:], high[1:]))
        return
    yield from ((one_of(first), *digits) for digits in _between(low[1:], "9" * rest))
    yield (
        one_of("".join(map(str, range(int(first) + 1, int(last))))),
        *[_DIGIT] * rest,
    )
    yield from ((one_of(last), *digits) for digits in _between("0" * rest, high[1:]))
