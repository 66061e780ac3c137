"""Python's regexes as expressions. Python's parser reads them, and its matcher
determines the characters of a set, so an automaton accepts only texts that
``re.fullmatch`` matches."""

import re
from functools import cache, lru_cache
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from dllm_engine.structured_output.expression import (
    ANY,
    EMPTY,
    LAST_CODE_POINT,
    Chars,
    Either,
    Expression,
    Repeated,
)

_REFUSED = {
    "AT": "an anchor (^, $, \\A, \\Z) that is not at an end of the text",
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a condition on a group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
}
_STARTS = [
    (_constants.AT, at)
    for at in (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING)
]
_ENDS = [(_constants.AT, at) for at in (_constants.AT_END, _constants.AT_END_STRING)]


def regex_expression(pattern: str, *, search: bool = False) -> Expression:
    """Expression of the texts that ``re.fullmatch`` matches, or with ``search`` of the
    texts in which ``re.search`` finds the pattern, with no text after a ``$``. Raises
    ``ValueError`` naming a construct that is not supported."""
    edge = Repeated(ANY, 0, None) if search else EMPTY
    try:
        parsed = _parser.parse(pattern)
        return _read(parsed, parsed.state.flags, edge, edge)
    except (re.error, OverflowError) as error:
        raise ValueError(
            f"{pattern!r} is not a regex that Python can read: {error}"
        ) from None
    except RecursionError:
        raise ValueError("the regex is nested too deeply") from None
    except NotImplementedError as error:
        raise ValueError(f"{error} in the regex {pattern!r} is not supported") from None


def _read(
    nodes: Any, flags: int, left: Expression | None, right: Expression | None
) -> Expression:
    """Expression of nodes. ``left`` and ``right``: texts that may stand before and
    behind the nodes if there is no anchor; None inside the text, where anchors are not
    supported."""
    nodes = list(nodes)
    while left is not None and nodes and nodes[0] in _STARTS:
        left = EMPTY
        nodes.pop(0)
    while right is not None and nodes and nodes[-1] in _ENDS:
        right = EMPTY
        nodes.pop()
    if not nodes:
        return (left or EMPTY, right or EMPTY)
    inner = [None] * (len(nodes) - 1)
    edges = zip(nodes, [left, *inner], [*inner, right], strict=True)
    return tuple(
        _node(str(code), argument, flags, *edge) for (code, argument), *edge in edges
    )


def _node(
    code: str,
    argument: Any,
    flags: int,
    left: Expression | None,
    right: Expression | None,
) -> Expression:
    match code:
        case "SUBPATTERN":
            _, added, removed, item = argument
            if added & _parser.TYPE_FLAGS:
                flags &= ~_parser.TYPE_FLAGS
            return _read(item, (flags | added) & ~removed, left, right)
        case "BRANCH":
            return Either([_read(branch, flags, left, right) for branch in argument[1]])
        case "LITERAL" if not flags & re.IGNORECASE:
            read: Expression = Chars(((argument, argument),))
        case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
            node = (
                getattr(_constants, code),
                tuple(argument) if code == "IN" else argument,
            )
            read = _matched(node, flags)
        case "MAX_REPEAT" | "MIN_REPEAT":
            minimum, maximum, item = argument
            # An anchor is at an end of the text only if the item occurs at most once.
            edges = [
                EMPTY if maximum == 1 and edge == EMPTY else None
                for edge in (left, right)
            ]
            maximum = None if maximum is _constants.MAXREPEAT else maximum
            read = Repeated(_read(item, flags, *edges), minimum, maximum)
        case "AT" if argument in (_constants.AT_BOUNDARY, _constants.AT_NON_BOUNDARY):
            raise NotImplementedError("\\b or \\B")
        case _:
            raise NotImplementedError(_REFUSED.get(code, code))
    return (left or EMPTY, read, right or EMPTY)


@lru_cache(maxsize=1024)
def _matched(node: tuple[Any, Any], flags: int) -> Chars:
    """Characters that a single node matches."""
    state = _parser.State()
    state.flags = flags
    one = _parser.SubPattern(state, [node])
    runs = _parser.SubPattern(
        state, [(_constants.MAX_REPEAT, (1, _constants.MAXREPEAT, one))]
    )
    text = _all_characters()
    matched_runs = _compiler.compile(runs, flags).finditer(text)
    return Chars(
        tuple(
            (ord(text[run.start()]), ord(text[run.end() - 1])) for run in matched_runs
        )
    )


@cache
def _all_characters() -> str:
    return "".join(
        chr(code) for code in range(LAST_CODE_POINT + 1) if not 0xD800 <= code < 0xE000
    )
