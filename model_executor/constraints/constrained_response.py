"""A response under a constraint: the most probable text that the constraint accepts."""

from collections.abc import Sequence

import numpy as np

from dllm_engine.constraints.constraint import Constraint

_LEAST = -1e9
"""Score of a token that is ruled out, for the case that no other text is accepted. It
is lower than all other scores, but not so low that sums of scores lose the others."""


class ConstrainedResponse:
    """Progress of one response's decided tokens in its constraint."""

    def __init__(
        self,
        constraint: Constraint,
        prompt_length: int,
        template: Sequence[int | None],
        first_end: int = 0,
        thinking_budget: int | None = None,
    ) -> None:
        """``template``: the response before its first step, with None for each mask.
        Canvas positions behind it may hold any token. ``first_end``: canvas position
        before which no mask becomes an end token."""
        self.constraint = constraint
        self._budget = thinking_budget
        self._start = prompt_length
        self._stop = prompt_length + len(template)
        self._first_end = max(first_end, prompt_length)
        self._completable = constraint.completable(
            template, self._first_end - prompt_length, thinking_budget
        )
        self._position = prompt_length
        self._state = 0

    def classes(
        self, known: np.ndarray, stop: int, positions: np.ndarray, scores: np.ndarray
    ) -> np.ndarray:
        """The class of each predicted position on the most probable way to complete the
        response, int64 ``[num_predicted]``.

        Decided tokens before ``stop`` that are not predicted stay. Masks without a
        prediction may become any token. Predictions behind ``stop`` are ignored; their
        class is −1.

        Args:
            known: ``[canvas_length]``, the canvas's tokens, −1 where masked.
            stop: end of the running blocks. Behind it only given tokens are decided.
            positions: predicted canvas positions, ascending; some may repeat.
            scores: score of the best token of each class, ``[num_predicted,
                num_classes]``.
        """
        stop = min(stop, self._stop)
        masked = np.flatnonzero(known[self._position : stop] < 0)
        first = self._position + int(masked[0]) if masked.size else stop
        first = min([first, *positions[:1].tolist()])
        self._read(known[self._position : first].tolist())
        self._position = first
        table = np.zeros((stop - first, self.constraint.num_classes))
        inside = positions < stop
        table[positions[inside] - first] = np.nan_to_num(
            scores[inside], nan=_LEAST, posinf=-_LEAST, neginf=_LEAST
        )
        table[: max(self._first_end - first, 0), -1] = -np.inf
        decided = np.setdiff1d(
            np.flatnonzero(known[first:stop] >= 0), positions - first
        )
        table[decided] = -np.inf
        table[decided, self.constraint.class_of[known[first:stop][decided]]] = 0.0
        accepted = self._completable[stop - self._start]
        path = self._most_probable(table, first, accepted)
        classes = np.full(len(positions), -1)
        classes[inside] = path[positions[inside] - first]
        return classes

    def _read(self, tokens: Sequence[int]) -> None:
        """The state after decided tokens; −1 if they lead nowhere."""
        for token in tokens:
            kind = int(self.constraint.class_of[token])
            leads = self._state >= 0 and kind >= 0
            self._state = (
                int(self.constraint.next_state[self._state, kind]) if leads else -1
            )

    def _most_probable(
        self, scores: np.ndarray, first: int, accepted: np.ndarray
    ) -> np.ndarray:
        """Classes of the run of tokens from the current state to one of ``accepted``
        (bool ``[num_states]``) with the largest sum of scores, int64 ``[num_tokens]``.
        Ties are decided in the same way each time.

        ``scores``: float64 ``[num_tokens, num_classes]``; −∞ for classes that must not
        be used. At least one run must have finite scores. ``first``: canvas position of
        the first token.
        """
        constraint = self.constraint
        t = self.constraint.transitions
        leeways = [
            constraint.leeway(first - self._start + number, self._budget)
            for number in range(len(scores))
        ]
        outside = {
            leeway: ~constraint.within(leeway, t.sources, t.targets)
            for leeway in set(leeways)
        }
        best = np.full((len(scores) + 1, constraint.num_states), -np.inf)
        best[0, self._state] = 0.0
        set_scores = np.full((len(scores), t.num_sets), -np.inf)
        for position, class_scores in enumerate(scores):
            np.maximum.at(set_scores[position], t.sets, class_scores[t.classes])
            arriving = best[position, t.sources] + set_scores[position, t.set_of]
            arriving[outside[leeways[position]]] = -np.inf
            best[position + 1, t.reached] = np.maximum.reduceat(arriving, t.into)
        path = np.empty(len(scores), dtype=np.int64)
        at = int(np.where(accepted, best[-1], -np.inf).argmax())
        for position in range(len(scores) - 1, -1, -1):
            into = np.flatnonzero((t.targets == at) & ~outside[leeways[position]])
            totals = (
                best[position, t.sources[into]] + set_scores[position, t.set_of[into]]
            )
            step = into[totals.argmax()]
            classes = t.classes[t.sets == t.set_of[step]]
            path[position] = classes[scores[position, classes].argmax()]
            at = int(t.sources[step])
        return path
