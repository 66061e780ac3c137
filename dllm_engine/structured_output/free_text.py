"""Automata of reasoning: free text that ends with the first marker."""

from typing import NamedTuple

import numpy as np

from dllm_engine.scheduler.constraints.automaton import Automaton
from dllm_engine.structured_output.lifting import token_automaton
from dllm_engine.structured_output.machine import Machine


class Reasoning(NamedTuple):
    """Markers of a model's reasoning."""

    end: str
    """The marker behind reasoning, such as ``</think>``."""
    end_token: int | None
    """The token that is this marker; None where the marker is spelled as other text is."""
    start_token: int | None
    """The token that may begin reasoning, such as ``<think>``, if there is one."""


def reasoning_automaton(
    reasoning: Reasoning, token_bytes: np.ndarray, starts: np.ndarray, most_states: int
) -> Automaton:
    """Reads any text up to the marker, which ends its last token. Beside tokens that spell text there are those of
    ``reasoning``: with an ``end_token`` nothing else spells the marker. Arguments and errors as ``token_automaton``."""
    free = token_automaton(_up_to(reasoning.end.encode()), token_bytes, starts, most_states)
    class_of, table = free.class_of.copy(), free.next_state
    ended = int(np.flatnonzero(free.accepting)[0])
    columns = []
    if reasoning.start_token is not None:
        columns.append((reasoning.start_token, np.where(np.arange(len(table)) == 0, 0, -1)))
    if reasoning.end_token is not None:
        table = np.where(table == ended, -1, table)
        columns.append((reasoning.end_token, np.where(free.accepting, -1, ended)))
    for token, column in columns:
        class_of[token] = table.shape[1]
        table = np.column_stack([table, column])
    return Automaton(class_of, table.astype(np.int32), free.accepting)


def _up_to(marker: bytes) -> Machine:
    """Reads bytes up to the first ``marker`` (Knuth, Morris and Pratt's automaton)."""
    table = np.zeros((len(marker) + 1, 256), np.int32)
    fallback = 0
    for read, byte in enumerate(marker):
        table[read] = table[fallback]
        fallback = int(table[fallback, byte]) if read else 0
        table[read, byte] = read + 1
    table[-1] = -1
    return Machine(table, np.arange(len(table)) == len(marker))
