"""Regular expressions as trees of characters, sequences, alternatives and repetitions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

LAST_CODE_POINT = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
"""Code points, as first and last of each run."""


@dataclass(frozen=True)
class Chars:
    """One character of a set. The set may take long to compute, and is where an automaton is built only."""

    ranges: Callable[[], Ranges]


@dataclass(frozen=True)
class Sequential:
    parts: tuple["Expression", ...]


@dataclass(frozen=True)
class Either:
    branches: tuple["Expression", ...]


@dataclass(frozen=True)
class Repeated:
    """``least`` to ``most`` times, without an upper bound where ``most`` is None, with a separator between."""

    item: "Expression"
    least: int
    most: int | None
    separator: "Expression | None" = None


@dataclass(frozen=True)
class Listed:
    """Some of the items, in their order, with a separator between."""

    items: tuple["Expression", ...]
    required: tuple[bool, ...]
    separator: "Expression"


Expression = Chars | Sequential | Either | Repeated | Listed
EMPTY = Sequential(())


def one_of(characters: str) -> Chars:
    ranges = tuple((ord(character), ord(character)) for character in characters)
    return Chars(lambda: ranges)


def literal(text: str) -> Expression:
    return Sequential(tuple(map(one_of, text)))


def either(branches: Iterable[Expression]) -> Expression:
    return Either(tuple(branches))


def sequence(*parts: Expression) -> Expression:
    return Sequential(parts)


def optional(item: Expression) -> Expression:
    return Repeated(item, 0, 1)


def without(ranges: Sequence[tuple[int, int]], holes: Sequence[tuple[int, int]]) -> Ranges:
    """Code points of ``ranges`` that are in none of the ``holes``."""
    kept = list(ranges)
    for low, high in holes:
        kept = [
            part
            for first, last in kept
            for part in ((first, min(last, low - 1)), (max(first, high + 1), last))
            if part[0] <= part[1]
        ]
    return tuple(kept)


def widths(expression: Expression) -> tuple[int, int | None]:
    """Characters in the shortest and in the longest text; None without a bound. Not for ``Listed``."""
    match expression:
        case Sequential(parts):
            found = [widths(part) for part in parts]
            longest = [most for _, most in found if most is not None]
            return sum(least for least, _ in found), sum(longest) if len(longest) == len(found) else None
        case Either(branches):
            found = [widths(branch) for branch in branches]
            longest = [most for _, most in found if most is not None]
            return min(least for least, _ in found), max(longest) if len(longest) == len(found) else None
        case Repeated(item, least, most):
            shortest, width = widths(item)
            return least * shortest, 0 if width == 0 else None if most is None or width is None else most * width
    return 1, 1
