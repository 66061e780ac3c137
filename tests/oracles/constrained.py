"""Constrained responses as slow, plain PyTorch: every token in every state, no classes.

A text is closed by an end token, after which only end tokens may follow. Masks without a prediction may be any token.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from dllm_engine.scheduler.constraints.automaton import unpacked


class PlainConstraint:
    def __init__(self, packed: bytes, end_tokens: Iterable[int]) -> None:
        automaton = unpacked(packed)
        self.closed, vocab_size = len(automaton.accepting), len(automaton.class_of)
        self.accepted = {*(q for q in range(self.closed) if automaton.accepting[q]), self.closed}
        self.following = torch.full((self.closed + 1, vocab_size), -1)
        for state in range(self.closed):
            for token, number in enumerate(automaton.class_of.tolist()):
                self.following[state, token] = automaton.next_state[state, number] if number >= 0 else -1
        for token in end_tokens:
            self.following[:, token] = -1
            self.following[list(self.accepted), token] = self.closed

    def accepts(self, tokens: Sequence[int]) -> bool:
        state = 0
        for token in tokens:
            state = int(self.following[state, token]) if state >= 0 else -1
        return state in self.accepted

    def before(self, states: set[int], token: int | None) -> set[int]:
        """From which states ``token``, or any, leads to one of ``states``."""
        columns = self.following if token is None else self.following[:, token : token + 1]
        return {q for q, row in enumerate(columns.tolist()) if states.intersection(row)}

    def best(self, start: int, rows: list[torch.Tensor], ends: set[int]) -> tuple[float, list[int]]:
        """The tokens with the largest sum of scores that lead from ``start`` to one of ``ends``, and the sum."""
        reached: dict[int, tuple[float, list[int]]] = {start: (0.0, [])}
        for row in rows:
            further: dict[int, tuple[float, list[int]]] = {}
            for state, (total, tokens) in reached.items():
                for target in set(self.following[state].tolist()) - {-1}:
                    leading = torch.where(self.following[state] == target, row, -math.inf)
                    score = total + float(leading.max())
                    if score > further.get(target, (-math.inf, []))[0]:
                        further[target] = score, [*tokens, int(leading.argmax())]
            reached = further
        return max((found for state, found in reached.items() if state in ends), default=(-math.inf, []))


def held_tokens(
    constraint: PlainConstraint,
    response: list[int | None],
    template: Sequence[int | None],
    stop: int,
    row_of: Callable[[int], torch.Tensor | None],
    gap: Callable[[float, float], None],
) -> dict[int, int]:
    """The token of each predicted mask of a response on the most probable way to complete it.

    Args:
        response: its tokens, None where masked.
        template: the same before the first step.
        stop: end of the running blocks.
        row_of: the scores of all tokens at a mask, float64; None where it is not predicted.
        gap: is told how close another way came.
    """
    ends = constraint.accepted
    for token in reversed(template[stop:]):
        ends = constraint.before(ends, token)
    vocab_size = constraint.following.shape[1]
    rows, predicted = [], []
    for place, token in enumerate(response[:stop]):
        scores = row_of(place) if token is None else None
        if token is not None:
            row = torch.full((vocab_size,), -math.inf, dtype=torch.float64)
            row[token] = 0.0
        else:
            row = torch.zeros(vocab_size, dtype=torch.float64) if scores is None else scores
        if scores is not None:
            predicted.append(place)
        rows.append(row)
    total, tokens = constraint.best(0, rows, ends)
    for place in predicted:
        other = rows[place].clone()
        other[tokens[place]] = -math.inf
        second, _ = constraint.best(0, [*rows[:place], other, *rows[place + 1 :]], ends)
        if second > -math.inf:
            gap(total, second)
    return {place: tokens[place] for place in predicted}
