"""Regular expressions as trees of characters, sequences, alternatives and repetitions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Union

LAST_CODE_POINT = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
"""Code points, as first and last of each run; a run whose last is smaller is empty."""


@dataclass(frozen=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Either:
    branches: Sequence["Expression"]


@dataclass(frozen=True)
class Repeated:
    """``least`` to ``most`` times, without an upper bound where ``most`` is None, with
    a separator between.
    """

    item: "Expression"
    least: int
    most: int | None
    separator: "Expression" = ()


@dataclass(frozen=True)
class Listed:
    """Some of the items, in their order, with a separator between."""

    items: Sequence[tuple["Expression", bool]]
    """Each item, and True if it is required."""
    separator: "Expression"


Expression = Union[Chars, bytes, tuple["Expression", ...], Either, Repeated, Listed]  # noqa: UP007
"""A tuple is a sequence. ``bytes`` are one byte of a set, which is part of a character
in UTF-8.
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
