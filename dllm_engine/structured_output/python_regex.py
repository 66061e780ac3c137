"""Python's regexes as expressions: Python's own parser reads them, and its own matcher says which characters a set
holds, so a text that an automaton accepts is one that ``re.fullmatch`` matches."""

import re
from collections.abc import Callable
from functools import cache, lru_cache
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from dllm_engine.structured_output.expression import (
    EMPTY,
    LAST_CODE_POINT,
    Chars,
    Either,
    Expression,
    Ranges,
    Repeated,
    Sequential,
)

_SURROGATES = range(0xD800, 0xE000)
_REFUSED = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a condition on a group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
}
_STARTS = ("AT_BEGINNING", "AT_BEGINNING_STRING")
_ENDS = ("AT_END", "AT_END_STRING")


def regex_expression(pattern: str, search: bool = False) -> Expression:
    """Texts that ``re.fullmatch`` matches, or with ``search`` those in which ``re.search`` finds the pattern and no
    text after a ``$``. Raises ``ValueError`` naming a construct that is not supported."""
    try:
        parsed = _parser.parse(pattern)
        if not search:
            return _Reader(pattern).read(parsed, parsed.state.flags, True, True)
        return _searched(pattern, parsed)
    except (re.error, OverflowError) as error:
        raise ValueError(f"{pattern!r} is not a regex that Python can read: {error}") from None
    except RecursionError:
        raise ValueError("the regex is nested too deeply") from None


def _searched(pattern: str, parsed: Any) -> Expression:
    """Each alternative with any text before and behind, unless ``^`` or ``$`` stands there."""
    anything = Repeated(Chars(lambda: ((0, LAST_CODE_POINT),)), 0, None)
    items = list(parsed)
    shared: list[Any] = []
    while items and str(items[0][0]) == "AT":
        shared.append(items.pop(0))
    alone = len(items) == 1 and str(items[0][0]) == "BRANCH"
    branches = items[0][1][1] if alone else [items]
    reader, texts = _Reader(pattern), []
    for branch in branches:
        nodes = [*shared, *branch]
        starts = bool(nodes) and str(nodes[0][0]) == "AT" and str(nodes[0][1]) in _STARTS
        ends = bool(nodes) and str(nodes[-1][0]) == "AT" and str(nodes[-1][1]) in _ENDS
        body = reader.read(nodes, parsed.state.flags, starts, ends)
        texts.append(Sequential((EMPTY if starts else anything, body, EMPTY if ends else anything)))
    return Either(tuple(texts))


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def refuse(self, construct: str) -> ValueError:
        return ValueError(f"{construct} in the regex {self.pattern!r} is not supported")

    def read(self, nodes: Any, flags: int, first: bool, last: bool) -> Expression:
        """``first`` and ``last``: whether the text starts before the nodes and ends behind them."""
        nodes, parts = list(nodes), []
        texts = [i for i, (code, _) in enumerate(nodes) if str(code) != "AT"]
        first_text, last_text = (texts[0], texts[-1]) if texts else (len(nodes), 0)
        for i, (code, argument) in enumerate(nodes):
            at_start, at_end = first and i <= first_text, last and i >= last_text
            parts.append(self._node(str(code), argument, flags, at_start, at_end))
        return parts[0] if len(parts) == 1 else Sequential(tuple(parts))

    def _node(self, code: str, argument: Any, flags: int, first: bool, last: bool) -> Expression:
        match code:
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                return Chars(_characters(code, argument, flags))
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, item = argument
                once = most == 1
                most = None if most is _constants.MAXREPEAT else int(most)
                return Repeated(self.read(item, flags, first and once, last and once), int(least), most)
            case "SUBPATTERN":
                _, added, removed, item = argument
                if added & _parser.TYPE_FLAGS:
                    flags &= ~_parser.TYPE_FLAGS
                return self.read(item, (flags | added) & ~removed, first, last)
            case "BRANCH":
                return Either(tuple(self.read(branch, flags, first, last) for branch in argument[1]))
            case "AT" if (str(argument) in _STARTS and first) or (str(argument) in _ENDS and last):
                return EMPTY
            case "AT" if str(argument) in (*_STARTS, *_ENDS):
                raise self.refuse("an anchor (^, $, \\A, \\Z) that is not at an end of the text")
            case "AT":
                raise self.refuse("\\b or \\B")
        raise self.refuse(_REFUSED.get(code, code))


def _characters(code: str, argument: Any, flags: int) -> Callable[[], Ranges]:
    if code == "LITERAL" and not flags & re.IGNORECASE:
        return lambda: ((argument, argument),)
    node = (getattr(_constants, code), tuple(argument) if code == "IN" else argument)
    return lambda: _matched(node, flags)


@lru_cache(maxsize=1024)
def _matched(node: tuple[Any, Any], flags: int) -> Ranges:
    """Characters that one node matches."""
    state = _parser.State()
    state.flags = flags
    one = _parser.SubPattern(state, [node])
    runs = _parser.SubPattern(state, [(_constants.MAX_REPEAT, (1, _constants.MAXREPEAT, one))])
    text = _all_characters()
    return tuple((ord(text[m.start()]), ord(text[m.end() - 1])) for m in _compiler.compile(runs, flags).finditer(text))


@cache
def _all_characters() -> str:
    return "".join(chr(code) for code in range(LAST_CODE_POINT + 1) if code not in _SURROGATES)
