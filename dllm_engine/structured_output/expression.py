"""Regular expressions as trees of characters, sequences, alternatives and repetitions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Union

LAST_CODE_POINT = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
"""Ranges of code points, as first and last. A range with a smaller last code point is
empty.
"""


@dataclass(frozen=True)
class Chars:
    """One character from a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Either:
    branches: Sequence["Expression"]


@dataclass(frozen=True)
class Repeated:
    """An item repeated ``minimum`` to ``maximum`` times (None: no upper bound), with
    separators.
    """

    item: "Expression"
    minimum: int
    maximum: int | None
    separator: "Expression" = ()


@dataclass(frozen=True)
class Listed:
    """Some of the items, in order, with separators."""

    items: Sequence[tuple["Expression", bool]]
    """Each item with True if it is required."""
    separator: "Expression"


Expression = Union[Chars, bytes, tuple["Expression", ...], Either, Repeated, Listed]  # noqa: UP007
"""A tuple is a sequence. ``bytes`` stand for one byte from a set, which is a part of a
UTF-8 character.
"""
EMPTY: Expression = ()
ANY = Chars(((0, LAST_CODE_POINT),))


@cache
def one_of(characters: str) -> Chars:
    return Chars(tuple((ord(character), ord(character)) for character in characters))


def literal(text: str) -> tuple[Expression, ...]:
    return tuple(map(one_of, text))


def optional(item: Expression) -> Expression:
    return Repeated(item, 0, 1)
