"""Builds one automaton or decision, in a process of its own: ``python -m
dllm_engine.structured_output.build``.

It reads a pickled ``BuildInput`` or ``DecisionInput`` from its standard input and
writes the packed result to its standard output; with the exit status ``REFUSED``, the
reason why there is none. It imports little, since it starts for each build.
"""

import json
import math
import os
import pickle
import resource
import signal
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dllm_engine.constraints.automaton import Automaton
from dllm_engine.model_executor.workers.parent import end_with_parent
from dllm_engine.structured_output import compiler
from dllm_engine.structured_output.expression import Either, Expression, literal
from dllm_engine.structured_output.json_text import OBJECT_DEPTH, Style
from dllm_engine.structured_output.python_regex import regex_expression

REFUSED = 100
_MEMORY = 3 << 30
"""Bytes that a build may take."""
_PATIENCE = 10
"""A busy machine gives a build less than a core: it is ended after as many times
``build_seconds``.
"""
LEAST_POSITIONS = 64
"""A search of fewer is not much cheaper, because other things take their time."""
_SPARE = 16
"""An automaton has more states before those that do the same are merged: up to as many
times the limit.
"""


@dataclass(frozen=True)
class Grammar:
    """Grammar of a request's text; equal for requests that may write the same texts in
    the same way.
    """

    kind: Literal["regex", "choice", "json", "json_object", "reasoning"]
    text: str = ""
    """The regex; as JSON the choices, the schema, or the markers of
    ``reasoning_automaton``; nothing for any object.
    """
    spaces: bool = True
    """JSON only: allow a space behind a comma and a colon."""

    @property
    def expression(self) -> Expression:
        """Expression of its texts; raises ``ValueError`` naming a construct that is not
        supported.
        """
        style = Style(self.spaces)
        match self.kind:
            case "regex":
                return regex_expression(self.text)
            case "choice":
                return Either(list(map(literal, json.loads(self.text))))
            case "json":
                # Other expressions need not wait for it.
                from dllm_engine.structured_output.json_schema import schema_expression

                return schema_expression(json.loads(self.text), style)
        return style.map(style.anything(OBJECT_DEPTH - 1))


@dataclass(frozen=True)
class BuildInput:
    """All that an automaton is made from, and its limits."""

    grammar: Grammar
    vocabulary: compiler.Vocabulary
    max_states: int
    build_seconds: float
    """Seconds of one core that building it may take."""
    max_search: int = 1 << 24
    """The most transitions × positions, of which at least ``LEAST_POSITIONS`` are
    searched.
    """

    @property
    def about(self) -> str:
        return f"structured_outputs.{self.grammar.kind}: its automaton"

    def run(self) -> bytes:
        """Build the automaton; raises ``ValueError`` with the reason why there is none."""
        try:
            return build(self).packed
        except ValueError as error:
            raise ValueError(
                f"structured_outputs.{self.grammar.kind}: {error}"
            ) from None


def build(wanted: BuildInput) -> Automaton:
    """Build the automaton; raises ``ValueError`` with the reason why there is none."""
    grammar = wanted.grammar
    vocabulary = wanted.vocabulary
    max_states = wanted.max_states
    try:
        if grammar.kind == "reasoning":
            return compiler.reasoning_automaton(
                vocabulary, max_states, *json.loads(grammar.text)
            )
        of_bytes = compiler.byte_automaton(grammar.expression, _SPARE * max_states)
        automaton = compiler.token_automaton(of_bytes, vocabulary, max_states)
    except compiler.TooManyStatesError:
        raise ValueError(
            f"its automaton has more states than max_automaton_states={max_states}; "
            f"shorter maximum lengths make it smaller, and so do [0-9] and "
            f"[A-Za-z0-9_] for \\d and \\w, which hold the letters of all languages"
        ) from None
    except (MemoryError, RecursionError) as error:
        raise ValueError(
            f"its automaton takes too much to build ({type(error).__name__})"
        ) from None
    transitions = np.count_nonzero(automaton.next_state >= 0)
    if transitions > (most := wanted.max_search // LEAST_POSITIONS):
        raise ValueError(
            f"its automaton has {transitions} transitions, of which "
            f"max_automaton_search={wanted.max_search} allows {most}; simplify it, "
            f"such as by shorter repetitions, or raise max_automaton_search"
        )
    return automaton


def main() -> None:
    end_with_parent()
    os.nice(10)  # beside steps that keep all cores busy it gets about a tenth of one
    wanted = pickle.load(sys.stdin.buffer)
    seconds = math.ceil(wanted.build_seconds)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    signal.alarm(_PATIENCE * seconds)
    try:
        sys.stdout.buffer.write(wanted.run())
    except ValueError as error:
        sys.stdout.buffer.write(str(error).encode(errors="replace"))
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
