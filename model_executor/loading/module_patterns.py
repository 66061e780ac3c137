"""Keys of ``rank_pattern`` and ``alpha_pattern``: expressions for the ends of modules'
names, as PEFT reads them (``re.match(rf"(.*\\.)?({key})$", module)``).

Python's matcher may take exponential time for such an expression. An automaton takes
one step per character.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dllm_engine.structured_output.compiler import TooManyStatesError, byte_automaton
from dllm_engine.structured_output.python_regex import regex_expression
from dllm_engine.text import shortened

_PREFIX = r"(.*\.)?"
_PLAIN = re.compile(r"[\w.\-]*")
"""Keys that Python's matcher reads quickly. Most keys are names of modules."""
_MOST_STATES = 2000
_LONGEST_KEY = 1000
_MOST_KEYS = 10_000
_MOST_EXPRESSIONS = 100
"""Limit on keys that are not plain: each may take 0.1 s to compile."""


class ModulePatterns:
    """Numbers by the ends of modules' names."""

    def __init__(
        self, path: Path, name: str, patterns: Mapping[str, Any] | None
    ) -> None:
        """``patterns``: value of the key ``name``. Raises ``ValueError`` naming the
        file and a key that is not an expression, or is too large.
        """
        stated = patterns or {}
        expressions = [key for key in stated if not _PLAIN.fullmatch(key)]
        for what, count, limit in (
            ("keys", len(stated), _MOST_KEYS),
            ("regular expressions", len(expressions), _MOST_EXPRESSIONS),
        ):
            if count > limit:
                raise ValueError(f"{path}: {name} has {count} {what}, at most {limit}")
        self._patterns: list[tuple[_PlainPattern | _Pattern, Any]] = []
        for key, value in stated.items():
            try:
                pattern = _PlainPattern(key) if _PLAIN.fullmatch(key) else _Pattern(key)
            except ValueError as error:
                raise ValueError(f"{path}: {name}[{shortened(key)}] {error}") from None
            self._patterns.append((pattern, value))

    def value_for(self, module: str, default: Any) -> Any:
        """The value of the first pattern that matches the end of the module's name."""
        for pattern, value in self._patterns:
            if pattern.matches(module):
                return value
        return default


class _PlainPattern:
    def __init__(self, key: str) -> None:
        self._compiled = re.compile(f"{_PREFIX}({key})$")

    def matches(self, module: str) -> bool:
        return self._compiled.match(module) is not None


class _Pattern:
    def __init__(self, key: str) -> None:
        if len(key) > _LONGEST_KEY:
            raise ValueError(f"is longer than {_LONGEST_KEY} characters")
        prefix = "" if key.startswith("^") else _PREFIX
        try:
            re.compile(key)  # valid by itself, not only within the parentheses below
            expression = regex_expression(f"{prefix}({key})$")
            self._automaton = byte_automaton(expression, _MOST_STATES)
        except TooManyStatesError:
            raise ValueError("matches too many names; simplify it") from None
        except (OverflowError, RecursionError, ValueError, re.error):
            raise ValueError("is not a supported regular expression") from None

    def matches(self, module: str) -> bool:
        state = 0
        for byte in module.encode():
            state = self._automaton.next_state[state, self._automaton.class_of[byte]]
            if state < 0:
                return False
        return bool(self._automaton.accepting[state])
