"""Build of one automaton or decision in a separate process: ``python -m
dllm_engine.structured_output.build``.

The process reads a pickled ``BuildInput`` or ``DecisionInput`` from standard input, and
writes the packed result to standard output, or with the exit status ``REFUSED`` the
reason why there is none. It imports little, because it starts for each build.
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
"""Limit on the memory of a build, in bytes."""
_PATIENCE = 10
"""A build is stopped after this multiple of ``build_seconds``, because on a busy
machine it gets less than a core.
"""
LEAST_POSITIONS = 64
"""The fewest positions that count in the cost of a search. Shorter searches are not
much cheaper.
"""
_SPARE = 16
"""Before equivalent states are merged, an automaton may have this multiple of the limit
of states.
"""


@dataclass(frozen=True)
class Grammar:
    """Grammar of a request's text. Grammars are equal if they were written equally."""

    kind: Literal["regex", "choice", "json", "json_object", "reasoning"]
    text: str = ""
    """The regex; or as JSON the choices, the schema, or the markers of
    ``reasoning_automaton``; empty for any object.
    """
    spaces: bool = True
    """JSON only: allow a space behind a comma and a colon."""

    @property
    def expression(self) -> Expression:
        """Expression of its texts. Raises ``ValueError`` naming a construct that is not
        supported.
        """
        style = Style(self.spaces)
        match self.kind:
            case "regex":
                return regex_expression(self.text)
            case "choice":
                return Either(list(map(literal, json.loads(self.text))))
            case "json":
                # Imported here, so that other expressions need not wait for it.
                from dllm_engine.structured_output.json_schema import schema_expression

                return schema_expression(json.loads(self.text), style)
        return style.map(style.anything(OBJECT_DEPTH - 1))


@dataclass(frozen=True)
class BuildInput:
    """Everything that an automaton is made from, and its limits."""

    grammar: Grammar
    vocabulary: compiler.Vocabulary
    max_states: int
    build_seconds: float
    """Limit on the build's time, in seconds of one core."""
    max_search: int = 1 << 24
    """Limit on transitions × positions of a search. Fewer positions count as
    ``LEAST_POSITIONS``.
    """

    @property
    def about(self) -> str:
        return f"structured_outputs.{self.grammar.kind}: its automaton"

    def run(self) -> bytes:
        """Build the automaton. Raises ``ValueError`` with the reason if there is none."""
        try:
            return build(self).packed
        except ValueError as error:
            raise ValueError(
                f"structured_outputs.{self.grammar.kind}: {error}"
            ) from None


def build(wanted: BuildInput) -> Automaton:
    """Build the automaton. Raises ``ValueError`` with the reason if there is none."""
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
    if transitions > (limit := wanted.max_search // LEAST_POSITIONS):
        raise ValueError(
            f"its automaton has {transitions} transitions, but "
            f"max_automaton_search={wanted.max_search} allows {limit}; simplify it, "
            f"for example by shorter repetitions, or raise max_automaton_search"
        )
    return automaton


def main() -> None:
    end_with_parent()
    # Beside steps that use all cores, the build gets about a tenth of a core.
    os.nice(10)
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
