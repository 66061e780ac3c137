"""JSON texts as expressions.

A text has at most one space behind each comma and colon, and no other whitespace outside strings. Strings hold
characters as themselves; of escapes there are those of one letter.
"""

import json
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any

from dllm_engine.structured_output.expression import (
    EMPTY,
    LAST_CODE_POINT,
    Chars,
    Either,
    Expression,
    Listed,
    Repeated,
    Sequential,
    either,
    literal,
    one_of,
    optional,
    sequence,
    without,
)

OBJECT_DEPTH = 4
"""Objects and arrays inside each other in any JSON object, with itself."""
VALUE_DEPTH = 2
"""Objects and arrays inside each other in a value of which a schema says nothing."""
_ESCAPED = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_DIGIT = one_of("0123456789")
_DIGITS = Repeated(_DIGIT, 0, None)
_INTEGER = sequence(optional(literal("-")), either([literal("0"), sequence(one_of("123456789"), _DIGITS)]))
_FRACTION = sequence(literal("."), Repeated(_DIGIT, 1, None))
_EXPONENT = sequence(one_of("eE"), optional(one_of("+-")), Repeated(_DIGIT, 1, 2))
_EXTRA_DIGITS = 6
_EXACT_DIGITS = 15
"""Decimals of as many digits stay apart, and in order, as Python's floats."""


def in_string(expression: Expression) -> Expression:
    """Spelling of an expression as a JSON string."""
    match expression:
        case Chars(ranges):

            def raw() -> Any:
                return without(ranges(), ((0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\"))))

            def letters() -> Any:
                held = [letter for char, letter in _ESCAPED.items() if any(a <= ord(char) <= b for a, b in ranges())]
                return tuple((ord(letter), ord(letter)) for letter in sorted(held))

            return either([Chars(raw), sequence(one_of("\\"), Chars(letters))])
        case Sequential(parts):
            return Sequential(tuple(map(in_string, parts)))
        case Either(branches):
            return Either(tuple(map(in_string, branches)))
        case Repeated(item, least, most):
            return Repeated(in_string(item), least, most)
    raise TypeError(expression)


def string(content: Expression) -> Expression:
    return sequence(literal('"'), in_string(content), literal('"'))


def any_string(least: int = 0, most: int | None = None) -> Expression:
    return string(Repeated(Chars(lambda: ((0, LAST_CODE_POINT),)), least, most))


@dataclass(frozen=True)
class Style:
    """Separators in JSON texts."""

    spaces: bool = True
    """Allow a space behind a comma and a colon."""

    def mark(self, character: str) -> Expression:
        return sequence(literal(character), optional(literal(" "))) if self.spaces else literal(character)

    def array(self, item: Expression, least: int = 0, most: int | None = None) -> Expression:
        return sequence(literal("["), Repeated(item, least, most, self.mark(",")), literal("]"))

    def tuple(self, items: list[Expression]) -> Expression:
        return sequence(literal("["), Listed(tuple(items), (True,) * len(items), self.mark(",")), literal("]"))

    def object(self, fields: dict[str, Expression], required: set[str]) -> Expression:
        items = tuple(self._field(constant(name, self), value) for name, value in fields.items())
        listed = Listed(items, tuple(name in required for name in fields), self.mark(","))
        return sequence(literal("{"), listed, literal("}"))

    def map(self, value: Expression) -> Expression:
        """An object of any keys."""
        return sequence(literal("{"), Repeated(self._field(any_string(), value), 0, None, self.mark(",")), literal("}"))

    def _field(self, key: Expression, value: Expression) -> Expression:
        return sequence(key, self.mark(":"), value)

    def anything(self, depth: int = VALUE_DEPTH) -> Expression:
        """Any value with up to ``depth`` objects and arrays inside each other."""
        values = [any_string(), NUMBER, *map(literal, ("true", "false", "null"))]
        if depth:
            values += [self.array(self.anything(depth - 1)), self.map(self.anything(depth - 1))]
        return either(values)


def constant(value: Any, style: Style) -> Expression:
    """One value. Raises ``ValueError`` for what JSON has no text for."""
    if isinstance(value, list):
        return style.tuple([constant(item, style) for item in value])
    if isinstance(value, dict):
        return style.object({name: constant(item, style) for name, item in value.items()}, set(value))
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # a lone surrogate is no text
    return literal(text)


NUMBER = sequence(_INTEGER, optional(_FRACTION), optional(_EXPONENT))


def integer(low: int | None, high: int | None) -> Expression:
    """Integers from ``low`` to ``high``, without a bound where that is None."""
    return _INTEGER if low is None and high is None else _scaled(low, high, 0)


def decimal(low: Fraction | None, high: Fraction | None, above: bool, below: bool) -> Expression:
    """Decimals without exponent from ``low`` to ``high``; ``above`` and ``below``: without these themselves. They have
    up to six digits more behind the point than the bounds. Raises ``ValueError`` for a bound of too many digits."""
    bounds = [bound for bound in (low, high) if bound is not None]
    places = next((n for n in range(_EXACT_DIGITS) if all(10**n % b.denominator == 0 for b in bounds)), _EXACT_DIGITS)
    if any(abs(bound) * 10 ** (places + _EXTRA_DIGITS) >= 10**_EXACT_DIGITS for bound in bounds):
        raise ValueError(f"it may have {_EXACT_DIGITS - _EXTRA_DIGITS} digits at most")
    texts = []
    for shown in range(places + _EXTRA_DIGITS + 1):
        first, last = (None if bound is None else bound * 10**shown for bound in (low, high))
        smallest = None if first is None else floor(first) + 1 if above else ceil(first)
        largest = None if last is None else ceil(last) - 1 if below else floor(last)
        texts.append(_scaled(smallest, largest, shown))
    return either(texts)


def _scaled(low: int | None, high: int | None, places: int) -> Expression:
    """n / 10^places, written with as many digits behind the point, for integers n from ``low`` to ``high``."""
    texts = []
    if high is None or high >= 0:
        texts.append(_natural(max(low or 0, 0), high, places))
    if low is None or low < 0:
        least = 1 if high is None else max(1, -high)
        texts.append(sequence(literal("-"), _natural(least, None if low is None else -low, places)))
    return either(texts)


def _natural(low: int, high: int | None, places: int) -> Expression:
    texts: list[Expression] = []
    length = max(len(str(low)), places + 1)
    while high is None or low <= high:
        largest = 10**length - 1
        top = largest if high is None else min(high, largest)
        texts.append(_digits(str(low).zfill(length), str(top).zfill(length), places))
        low, length = largest + 1, length + 1
        if high is None:
            more = Repeated(_DIGIT, length - 1 - places, None)
            texts.append(sequence(one_of("123456789"), more, _any_digits(places, places)))
            break
    return either(texts)


def _digits(low: str, high: str, places: int) -> Expression:
    """From ``low`` to ``high``, of as many digits; the last ``places`` digits are behind the point."""
    rest = len(low) - 1
    if set(low) <= {"0"} and set(high) <= {"9"}:
        return _any_digits(len(low), places)
    point = literal(".") if len(low) == places else EMPTY
    if low[0] == high[0]:
        return sequence(point, literal(low[0]), _digits(low[1:], high[1:], places))
    between = "".join(map(str, range(int(low[0]) + 1, int(high[0]))))
    return sequence(
        point,
        either(
            [
                sequence(literal(low[0]), _digits(low[1:], "9" * rest, places)),
                sequence(one_of(between), _any_digits(rest, places)),
                sequence(literal(high[0]), _digits("0" * rest, high[1:], places)),
            ]
        ),
    )


def _any_digits(count: int, places: int) -> Expression:
    behind = min(count, places)
    point = literal(".") if 0 < places <= count else EMPTY
    return sequence(Repeated(_DIGIT, count - behind, count - behind), point, Repeated(_DIGIT, behind, behind))
