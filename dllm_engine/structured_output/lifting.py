"""Automata over tokens: from one over bytes, and of reasoning, which is free text that ends with the first marker."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from dllm_engine.scheduler.constraints.constraint import Automaton
from dllm_engine.structured_output.expression import Repeated
from dllm_engine.structured_output.machine import TooManyStatesError, byte_automaton, minimal


class Vocabulary:
    """The bytes of a tokenizer's tokens; equal where these are."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.token_bytes = np.frombuffer(b"".join(tokens), np.uint8)
        """uint8: the bytes of all tokens, end to end."""
        self.starts = np.cumsum([0, *map(len, tokens)])
        """int64 ``[vocab_size + 1]``: where those of each token begin. Special and added tokens have none, nor have
        numbers that the tokenizer does not use."""
        self.digest = _digest(self.token_bytes) + _digest(self.starts)

    def spelling(self, token: int) -> bytes:
        return self.token_bytes[slice(*self.starts[token : token + 2])].tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def token_automaton(of_bytes: Automaton, vocabulary: Vocabulary, most_states: int) -> Automaton:
    """The automaton over tokens; those without bytes are in no text. Raises ``ValueError`` where no text can be
    spelled, ``TooManyStatesError`` where over ``most_states`` are left."""
    automaton = minimal(_over_tokens(of_bytes, vocabulary.token_bytes, vocabulary.starts))
    if not len(automaton.accepting):
        raise ValueError("the tokens of this model spell no text that matches")
    if len(automaton.accepting) > most_states:
        raise TooManyStatesError
    return automaton


def _over_tokens(of_bytes: Automaton, token_bytes: np.ndarray, starts: np.ndarray) -> Automaton:
    """The automaton over tokens, with the same states.

    Reads byte i of all tokens at once. Tokens that have led alike so far are read as one.
    """
    by_kind = np.pad(of_bytes.next_state.T, ((0, 0), (0, 1)), constant_values=-1)
    states = np.arange(len(of_bytes.accepting), dtype=np.int32)
    columns = [np.full_like(states, -1), states]  # the first leads nowhere
    numbers = {_digest(column): number for number, column in enumerate(columns)}
    lengths = np.diff(starts)
    column_of = (lengths > 0).astype(np.int64)
    for i in range(int(lengths.max(initial=0))):
        tokens = np.flatnonzero((lengths > i) & (column_of > 0))
        kinds = of_bytes.class_of[token_bytes[starts[tokens] + i]]
        steps, step_of = np.unique(column_of[tokens] * len(by_kind) + kinds, return_inverse=True)
        for step_number, step in enumerate(steps.tolist()):
            before, kind = divmod(step, len(by_kind))
            column = by_kind[kind][columns[before]]
            steps[step_number] = number = numbers.setdefault(_digest(column), len(columns))
            if number == len(columns):
                columns.append(column)
        column_of[tokens] = steps[step_of]
    used, class_of = np.unique(column_of, return_inverse=True)
    return Automaton(class_of, np.stack([columns[number] for number in used], axis=1), of_bytes.accepting)


def _digest(column: np.ndarray) -> bytes:
    return blake2b(column.tobytes(), digest_size=16).digest()


class Reasoning(NamedTuple):
    """Markers of a model's reasoning."""

    end: str
    """The marker behind reasoning, such as ``</think>``."""
    end_token: int | None
    """The token that is this marker; None where the marker is spelled as other text is."""
    start_token: int | None
    """The token that may begin reasoning, such as ``<think>``, if there is one."""


def reasoning_automaton(reasoning: Reasoning, vocabulary: Vocabulary, most_states: int) -> Automaton:
    """Reads any text up to the marker, which ends its last token. Beside tokens that spell text there are those of
    ``reasoning``: with an ``end_token`` nothing else spells the marker. Arguments and errors as ``token_automaton``."""
    anything = Repeated(bytes(range(256)), 0, None)
    of_bytes = byte_automaton((anything, *(bytes([byte]) for byte in reasoning.end.encode())), most_states)
    of_bytes.next_state[of_bytes.accepting] = -1  # the first marker ends it
    free = token_automaton(of_bytes, vocabulary, most_states)
    class_of, table = free.class_of.copy(), free.next_state
    ended = int(np.flatnonzero(free.accepting)[0])
    if reasoning.end_token is not None:
        table = np.where(table == ended, -1, table)
    start, end = np.where(np.arange(len(table)) == 0, 0, -1), np.where(free.accepting, -1, ended)
    for token, column in ((reasoning.start_token, start), (reasoning.end_token, end)):
        if token is not None:
            class_of[token] = table.shape[1]
            table = np.column_stack([table, column])
    return Automaton(class_of, table.astype(np.int32), free.accepting)
