"""Builds one automaton, in a process of its own: ``python -m dllm_engine.structured_output.build``.

It reads a ``Task`` from its standard input and writes an answer to its standard output. It imports little, since it
starts for each automaton.
"""

import io
import json
import os
import resource
import sys
from dataclasses import asdict, dataclass

import numpy as np

from dllm_engine.model_executor.workers.parent import end_with_parent
from dllm_engine.scheduler.constraints.automaton import Automaton
from dllm_engine.structured_output.expression import Expression, either, literal
from dllm_engine.structured_output.json_schema import schema_expression
from dllm_engine.structured_output.json_text import OBJECT_DEPTH, Style
from dllm_engine.structured_output.lifting import token_automaton
from dllm_engine.structured_output.machine import TooManyStatesError, byte_machine, character_machine
from dllm_engine.structured_output.python_regex import regex_expression

BUILT, FAILED = b"+", b"-"
"""How an answer begins; a packed automaton or a message follows."""
_MEMORY = 3 << 30
"""Bytes that a build may take."""
_SPARE = 16
"""An automaton has more states before those that do the same are merged: up to as many times the limit."""


@dataclass(frozen=True)
class Task:
    kind: str
    text: str
    spaces: bool
    max_states: int
    seconds: int
    """Of one core."""

    def message(self, token_bytes: np.ndarray, starts: np.ndarray) -> bytes:
        buffer = io.BytesIO(json.dumps(asdict(self)).encode() + b"\n")
        buffer.seek(0, io.SEEK_END)
        for array in (token_bytes, starts):
            np.save(buffer, array, allow_pickle=False)
        return buffer.getvalue()


def expression_of(kind: str, text: str, spaces: bool) -> Expression:
    """What the texts of a grammar look like; raises ``ValueError`` naming a construct that is not supported."""
    match kind:
        case "regex":
            return regex_expression(text)
        case "choice":
            return either(map(literal, json.loads(text)))
        case "json":
            return schema_expression(json.loads(text), Style(spaces))
    style = Style(spaces)
    return style.map(style.anything(OBJECT_DEPTH - 1))


def build(task: Task, token_bytes: np.ndarray, starts: np.ndarray) -> Automaton:
    """Raises ``ValueError`` with the reason why there is no automaton."""
    try:
        machine = byte_machine(
            *character_machine(expression_of(task.kind, task.text, task.spaces), _SPARE * task.max_states)
        )
        return token_automaton(machine, token_bytes, starts, task.max_states)
    except TooManyStatesError:
        raise ValueError(
            f"its automaton has more states than max_automaton_states={task.max_states}; shorter maximum lengths make "
            "it smaller, and so do [0-9] and [A-Za-z0-9_] for \\d and \\w, which hold the letters of all languages"
        ) from None
    except (MemoryError, RecursionError) as error:
        raise ValueError(f"its automaton takes too much to build ({type(error).__name__})") from None


def main() -> None:
    end_with_parent()
    os.nice(10)  # beside steps that keep all cores busy it gets about a tenth of one
    message = io.BytesIO(sys.stdin.buffer.read())
    task = Task(**json.loads(message.readline()))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (task.seconds, task.seconds + 1))
    arrays = [np.load(message, allow_pickle=False) for _ in range(2)]
    try:
        answer = BUILT + build(task, *arrays).packed
    except ValueError as error:
        answer = FAILED + str(error).encode()
    sys.stdout.buffer.write(answer)


if __name__ == "__main__":
    main()
