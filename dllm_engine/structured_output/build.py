"""Builds one automaton, in a process of its own: ``python -m dllm_engine.structured_output.build``.

It reads the pickled arguments of ``build`` from its standard input and writes an answer to its standard output. It
imports little, since it starts for each automaton.
"""

import json
import math
import os
import pickle
import resource
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dllm_engine.model_executor.workers.parent import end_with_parent
from dllm_engine.scheduler.constraints.automaton import Automaton
from dllm_engine.structured_output.expression import Expression, either, literal
from dllm_engine.structured_output.free_text import Reasoning, reasoning_automaton
from dllm_engine.structured_output.json_schema import schema_expression
from dllm_engine.structured_output.json_text import OBJECT_DEPTH, Style
from dllm_engine.structured_output.lifting import token_automaton
from dllm_engine.structured_output.machine import TooManyStatesError, byte_machine, character_machine
from dllm_engine.structured_output.python_regex import regex_expression

BUILT, FAILED = b"+", b"-"
"""First byte of an answer; a packed automaton or a message follows."""
_MEMORY = 3 << 30
"""Bytes that a build may take."""
LEAST_POSITIONS = 64
"""A search of fewer is not much cheaper, because other things take their time."""
_SPARE = 16
"""An automaton has more states before those that do the same are merged: up to as many times the limit."""


@dataclass(frozen=True)
class Grammar:
    """Grammar of a request's text; equal for requests that may write the same texts in the same way."""

    kind: Literal["regex", "choice", "json", "json_object", "reasoning"]
    text: str = ""
    """The regex; the choices, the schema or the fields of ``Reasoning`` as JSON; nothing for any JSON object."""
    spaces: bool = True
    """JSON only: allow a space behind a comma and a colon."""

    @property
    def expression(self) -> Expression:
        """Expression of its texts; raises ``ValueError`` naming a construct that is not supported."""
        style = Style(self.spaces)
        match self.kind:
            case "regex":
                return regex_expression(self.text)
            case "choice":
                return either(map(literal, json.loads(self.text)))
            case "json":
                return schema_expression(json.loads(self.text), style)
        return style.map(style.anything(OBJECT_DEPTH - 1))


@dataclass(frozen=True)
class Limits:
    """Limits of one automaton."""

    max_states: int
    build_seconds: float
    """Seconds of one core that building it may take."""
    max_search: int = 1 << 24
    """The most transitions × positions, of which at least ``LEAST_POSITIONS`` are searched."""


def build(grammar: Grammar, limits: Limits, token_bytes: np.ndarray, starts: np.ndarray) -> Automaton:
    """Raises ``ValueError`` with the reason why there is no automaton."""
    try:
        if grammar.kind == "reasoning":
            return reasoning_automaton(Reasoning(*json.loads(grammar.text)), token_bytes, starts, limits.max_states)
        machine = byte_machine(*character_machine(grammar.expression, _SPARE * limits.max_states))
        automaton = token_automaton(machine, token_bytes, starts, limits.max_states)
    except TooManyStatesError:
        raise ValueError(
            f"its automaton has more states than max_automaton_states={limits.max_states}; shorter maximum lengths "
            "make it smaller, and so do [0-9] and [A-Za-z0-9_] for \\d and \\w, which hold the letters of all languages"
        ) from None
    except (MemoryError, RecursionError) as error:
        raise ValueError(f"its automaton takes too much to build ({type(error).__name__})") from None
    transitions = np.count_nonzero(automaton.next_state >= 0)
    if transitions > (most := limits.max_search // LEAST_POSITIONS):
        raise ValueError(
            f"its automaton has {transitions} transitions, of which max_automaton_search={limits.max_search} allows "
            f"{most}; simplify it, such as by shorter repetitions, or raise max_automaton_search"
        )
    return automaton


def answer(grammar: Grammar, limits: Limits, token_bytes: np.ndarray, starts: np.ndarray) -> bytes:
    """The packed automaton, or why there is none."""
    try:
        return BUILT + build(grammar, limits, token_bytes, starts).packed
    except ValueError as error:
        return FAILED + str(error).encode(errors="replace")


def main() -> None:
    end_with_parent()
    os.nice(10)  # beside steps that keep all cores busy it gets about a tenth of one
    grammar, limits, *arrays = pickle.load(sys.stdin.buffer)
    seconds = math.ceil(limits.build_seconds)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    sys.stdout.buffer.write(answer(grammar, limits, *arrays))


if __name__ == "__main__":
    main()
