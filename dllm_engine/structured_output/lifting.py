"""From an automaton over bytes to one over tokens."""

import numpy as np

from dllm_engine.scheduler.constraints.automaton import Automaton
from dllm_engine.structured_output.machine import Machine, TooManyStatesError, distinct_rows


def token_automaton(machine: Machine, token_bytes: np.ndarray, starts: np.ndarray, most_states: int) -> Automaton:
    """The automaton over tokens; token i is ``token_bytes[starts[i]:starts[i + 1]]`` (uint8), and without bytes in no
    text. Raises ``ValueError`` where no text can be spelled, ``TooManyStatesError`` where over ``most_states`` are
    left."""
    columns, class_of = _columns(machine, token_bytes, starts)
    spelled = Machine(columns.T, machine.accepting).trimmed()
    if not len(spelled.accepting):
        raise ValueError("the tokens of this model spell no text that matches")
    spelled = spelled.minimal()
    if len(spelled.accepting) > most_states:
        raise TooManyStatesError
    table = spelled.next_state.T
    firsts, kinds = distinct_rows(table)
    alive = (table[firsts] >= 0).any(1)
    kinds = np.append(np.where(alive, np.cumsum(alive) - 1, -1)[kinds], -1)  # the last is for dead tokens
    table = np.ascontiguousarray(table[firsts][alive].T, np.int32)
    return Automaton(kinds[class_of].astype(np.int32), table, spelled.accepting)


def _columns(machine: Machine, token_bytes: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Targets of tokens from every state, ``[classes, states]``, and the class of each token; −1 for dead ones.

    Reads byte i of all tokens at once. Tokens that have led alike so far are read as one.
    """
    firsts, byte_kind = distinct_rows(machine.next_state.T)
    by_byte = np.pad(machine.next_state[:, firsts], ((0, 1), (0, 0)), constant_values=-1).T
    lengths = np.diff(starts)
    class_of = np.full(len(lengths), -1)
    tokens = np.flatnonzero(lengths)
    columns = np.arange(len(machine.accepting), dtype=np.int32)[None]
    column_of = np.zeros(len(tokens), np.int64)
    finished: list[np.ndarray] = []
    for i in range(int(lengths.max(initial=0))):
        kinds = byte_kind[token_bytes[starts[tokens] + i]]
        steps, step_of = np.unique(column_of * len(firsts) + kinds, return_inverse=True)
        sources, kinds = np.divmod(steps, len(firsts))
        # In portions, since most steps lead nowhere and hold memory only until that is known.
        portions = [
            (part, reached)
            for first in range(0, len(steps), 512)
            for led in [by_byte[kinds[first : first + 512, None], columns[sources[first : first + 512]]]]
            for part in [np.flatnonzero((led >= 0).any(1)) + first]
            for reached in [led[part - first]]
        ]
        alive = np.concatenate([part for part, _ in portions])
        columns = np.concatenate([reached for _, reached in portions])
        firsts_of, column = distinct_rows(columns)
        names = np.full(len(steps), -1)
        names[alive] = column
        columns, column_of = columns[firsts_of], names[step_of]
        tokens, column_of = tokens[column_of >= 0], column_of[column_of >= 0]
        ends = lengths[tokens] == i + 1
        base = sum(map(len, finished))
        used, place = np.unique(column_of[ends], return_inverse=True)
        class_of[tokens[ends]] = base + place
        finished.append(columns[used])
        tokens, column_of = tokens[~ends], column_of[~ends]
        if not len(tokens):
            break
    table = np.concatenate(finished or [columns[:0]])
    firsts_of, column = distinct_rows(table)
    return table[firsts_of], np.append(column, -1)[class_of]
