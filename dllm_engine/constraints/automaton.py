"""Automata over tokens."""

import io
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

FAR = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, eq=False)
class Automaton:
    """Automaton that reads a text token by token, from state 0. Tokens that lead to the
    same state from every state form a class, so a few hundred classes represent a
    vocabulary of 126,464."""

    class_of: np.ndarray
    """int32 ``[vocab_size]``: the class of each token; −1 for a token that is in no
    accepted text.
    """
    next_state: np.ndarray
    """int32 ``[num_states, num_classes]``: the state after a class; −1 if no accepted
    text begins that way.
    """
    accepting: np.ndarray
    """bool ``[num_states]``: whether the text may end here."""

    @cached_property
    def packed(self) -> bytes:
        """The automaton as bytes, equal for equal automata. ``unpacked`` restores it."""
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            class_of=self.class_of,
            next_state=self.next_state,
            accepting=self.accepting,
            allow_pickle=False,
        )
        return buffer.getvalue()


def joined(first: Automaton, second: Automaton) -> Automaton:
    """Automaton that accepts a text of ``first`` followed by a text of ``second``. No
    accepted text of ``first`` may be the beginning of another one.
    """
    tables = [
        np.pad(part.next_state, ((0, 0), (0, 1)), constant_values=-1)
        for part in (first, second)
    ]
    num_kinds = tables[1].shape[1]
    pair_of = (first.class_of + 1) * num_kinds + second.class_of + 1
    # Pair 0, which comes first, is that of tokens in neither automaton.
    pairs, pair_numbers = np.unique(np.append(pair_of, 0), return_inverse=True)
    kinds, second_kinds = np.divmod(pairs[1:], num_kinds)
    before = ~first.accepting
    num_before = int(before.sum())
    names = np.append(np.where(before, np.cumsum(before) - 1, num_before), -1)
    led = names[tables[0][before][:, kinds - 1]]
    second_led = tables[1][:, second_kinds - 1]
    second_led = np.where(second_led < 0, -1, second_led + num_before)
    return Automaton(
        (pair_numbers[:-1] - 1).astype(np.int32),
        np.concatenate([led, second_led]).astype(np.int32),
        np.append(np.zeros(num_before, bool), second.accepting),
    )


def any_text(vocab_size: int) -> Automaton:
    """Automaton that accepts every text."""
    return Automaton(
        np.zeros(vocab_size, np.int32), np.zeros((1, 1), np.int32), np.ones(1, bool)
    )


def distances(
    sources: np.ndarray, targets: np.ndarray, begins: np.ndarray
) -> np.ndarray:
    """Fewest edges from a state of ``begins`` (bool ``[num_states]``) to each state,
    int64; ``FAR`` if no path leads there.

    Edge i leads from ``sources[i]`` to ``targets[i]``; each is followed once.
    """
    order = np.argsort(sources, kind="stable")
    targets = targets[order]
    bounds = np.searchsorted(sources[order], np.arange(len(begins) + 1))
    distance = np.where(begins, 0, FAR)
    count = 0
    latest = np.flatnonzero(begins)
    while latest.size:
        count += 1
        sizes = bounds[latest + 1] - bounds[latest]
        edges = np.arange(sizes.sum()) + np.repeat(
            bounds[latest] - np.cumsum(sizes) + sizes, sizes
        )
        latest = np.unique(targets[edges])
        latest = latest[distance[latest] > count]
        distance[latest] = count
    return distance


@lru_cache(maxsize=16)
def unpacked(packed: bytes) -> Automaton:
    """The automaton of ``Automaton.packed``, cached for requests with the same
    constraint.
    """
    with np.load(io.BytesIO(packed), allow_pickle=False) as tables:
        return Automaton(**tables)
