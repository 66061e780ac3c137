"""What the tokens of a response may be, position by position: an automaton, and the tokens that end a response."""

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from dllm_engine.scheduler.constraints.automaton import Automaton, unpacked

_LEAST = -1e9
"""Score of a token that is ruled out: the text must be accepted all the same. Less than any other, and no so much less
that the sum of a text's scores would not tell them apart."""


class Constraint:
    """An automaton of which an end token closes the text. Only end tokens follow one.

    The end tokens are one more class, and the closed text is one more state.
    """

    def __init__(self, automaton: Automaton, end_tokens: frozenset[int]) -> None:
        num_states, num_classes = automaton.next_state.shape
        self.class_of = automaton.class_of.copy()
        """int32 ``[vocab_size]``: the class of each token; −1 for a token that is in no accepted text."""
        self.class_of[sorted(end_tokens)] = num_classes
        self.next_state = np.full((num_states + 1, num_classes + 1), -1, dtype=np.int32)
        """int32 ``[num_states, num_classes]``; −1 where a class leads nowhere."""
        self.next_state[:-1, :-1] = automaton.next_state
        self.accepting = np.append(automaton.accepting, True)
        """bool ``[num_states]``"""
        self.next_state[self.accepting, -1] = num_states
        # An end token may have been the only one of a class.
        used = np.bincount(self.class_of[self.class_of >= 0], minlength=num_classes + 1) > 0
        self.next_state[:, ~used] = -1
        self.num_states, self.num_classes = self.next_state.shape
        self._before_masks = [self.accepting]
        """From which states so many tokens lead to an accepted text; grows as it is asked for."""
        self._settled = False
        """Whether any more tokens lead there from the states of the last entry."""

    def completable(self, template: Sequence[int | None], first_end: int = 0) -> list[np.ndarray]:
        """For each position of a response and the one behind it, bool ``[num_states]``: from which states what is given
        there and behind, and some tokens for its masks, lead to an accepted text.

        ``template``: the response, with None for each mask; of those before ``first_end`` none is an end token.
        """
        num_given = next((i for i in range(len(template), 0, -1) if template[i - 1] is not None), 0)
        alike = max(num_given, first_end)
        found = [self._completed_by(count) for count in range(len(template) - alike + 1)]
        for place in range(alike - 1, -1, -1):
            found.append(self._before(found[-1], template[place], ends=place >= first_end))
        return found[::-1]

    def _completed_by(self, count: int) -> np.ndarray:
        """The states from which ``count`` tokens lead to an accepted text, bool ``[num_states]``."""
        while count >= len(self._before_masks) and not self._settled:
            last = self._before_masks[-1]
            self._before_masks.append(self._before(last, None))
            self._settled = np.array_equal(self._before_masks[-1], last)
        return self._before_masks[min(count, len(self._before_masks) - 1)]

    def fewest_tokens(self) -> int | None:
        """Of an accepted text, without an end token; None where there is no such text."""
        return next((count for count in range(self.num_states) if self._completed_by(count)[0]), None)

    def _before(self, accepted: np.ndarray, token: int | None, ends: bool = True) -> np.ndarray:
        """The states from which a token, or any, leads to one of ``accepted``; without ``ends``, any but an end
        token."""
        before = np.zeros_like(accepted)
        if token is None:
            sources, targets = self._steps if ends else self._steps_inside
            before[sources[accepted[targets]]] = True
        elif self.class_of[token] >= 0:
            following = self.next_state[:, self.class_of[token]]
            before[(following >= 0) & accepted[following]] = True
        return before

    @cached_property
    def _steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of states of which a token leads from the first to the second."""
        return _linked(self.next_state)

    @cached_property
    def _steps_inside(self) -> tuple[np.ndarray, np.ndarray]:
        """Those of which a token does that is no end token."""
        return _linked(self.next_state[:, :-1])

    @cached_property
    def _edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """State and class of all that leads somewhere, by where it leads; these states, and where each one's begin."""
        sources, classes = np.nonzero(self.next_state >= 0)
        targets = self.next_state[sources, classes]
        order = np.argsort(targets, kind="stable")
        reached, begins = np.unique(targets[order], return_index=True)
        return sources[order], classes[order], reached, np.append(begins, len(order))

    def after(self, state: int, tokens: Sequence[int]) -> int:
        """The state after ``tokens``; −1 where they lead nowhere."""
        for token in tokens:
            kind = int(self.class_of[token])
            state = int(self.next_state[state, kind]) if state >= 0 and kind >= 0 else -1
        return state

    def most_probable(self, state: int, scores: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        """The classes of a run of tokens from ``state`` to one of ``accepted`` with the largest sum of scores, int64
        ``[num_tokens]``; of equal ones any, but always the same.

        Args:
            state: before the first token.
            scores: float64 ``[num_tokens, num_classes]``, of the best token of each class, such as log-probabilities.
                −∞ for what must not be taken.
            accepted: bool ``[num_states]``; some run of finite scores leads there.
        """
        sources, kinds, reached, begins = self._edges
        best = np.full((len(scores) + 1, self.num_states), -np.inf)
        best[0, state] = 0.0
        for position, of_position in enumerate(scores):
            arriving = best[position, sources] + of_position[kinds]
            best[position + 1, reached] = np.maximum.reduceat(arriving, begins[:-1])
        path = np.empty(len(scores), dtype=np.int64)
        at = int(np.where(accepted, best[-1], -np.inf).argmax())
        for position in range(len(scores) - 1, -1, -1):
            number = int(np.searchsorted(reached, at))
            into = slice(begins[number], begins[number + 1])
            step = int((best[position, sources[into]] + scores[position, kinds[into]]).argmax())
            path[position], at = kinds[into][step], int(sources[into][step])
        return path


def _linked(next_state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of states of which some class leads from the first to the second."""
    sources, classes = np.nonzero(next_state >= 0)
    keys = np.unique(sources * len(next_state) + next_state[sources, classes])
    return keys // len(next_state), keys % len(next_state)


@lru_cache(maxsize=16)
def constraint_of(packed: bytes, end_tokens: frozenset[int]) -> Constraint:
    """The constraint of ``Automaton.packed``. Requests of one automaton share it."""
    return Constraint(unpacked(packed), end_tokens)


class ConstrainedResponse:
    """How far the decided part of one response has led its constraint."""

    def __init__(
        self, constraint: Constraint, prompt_length: int, template: Sequence[int | None], first_end: int = 0
    ) -> None:
        """``template``: the response before its first step, with None for each mask. What the canvas has behind it may
        be anything. ``first_end``: the canvas position before which no mask becomes an end token."""
        self.constraint = constraint
        self._start, self._stop = prompt_length, prompt_length + len(template)
        self._first_end = max(first_end, prompt_length)
        self._completable = constraint.completable(template, self._first_end - prompt_length)
        self._position, self._state = prompt_length, 0

    def classes(self, known: np.ndarray, stop: int, positions: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """The class of each predicted position on the most probable way to complete the response, int64
        ``[num_predicted]``.

        What is decided up to ``stop`` is kept. Masks without a prediction may be anything. What is predicted behind
        ``stop`` is left out; its class is −1.

        Args:
            known: ``[canvas_length]``, the canvas's tokens, −1 where masked.
            stop: end of the running blocks. Behind it only what the template gives is decided.
            positions: canvas positions that are predicted, ascending but for repeated ones.
            scores: ``[num_predicted, num_classes]``, of the best token of each class.
        """
        stop = min(stop, self._stop)
        masked = np.flatnonzero(known[self._position : stop] < 0)
        first = self._position + int(masked[0]) if masked.size else stop
        self._state = self.constraint.after(self._state, known[self._position : first].tolist())
        self._position = first
        table = np.zeros((stop - first, self.constraint.num_classes))
        inside = positions < stop
        table[positions[inside] - first] = np.nan_to_num(scores[inside], nan=_LEAST, posinf=-_LEAST, neginf=_LEAST)
        table[: max(self._first_end - first, 0), -1] = -np.inf
        decided = np.flatnonzero(known[first:stop] >= 0)
        table[decided] = -np.inf
        table[decided, self.constraint.class_of[known[first:stop][decided]]] = 0.0
        path = self.constraint.most_probable(self._state, table, self._completable[stop - self._start])
        found = np.full(len(positions), -1)
        found[inside] = path[positions[inside] - first]
        return found
