"""A decision of one request, pass by pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dllm_engine.constraints.graph import END
from dllm_engine.model_executor.constraints.accepted_texts import (
    AcceptedTexts,
    Posterior,
)
from dllm_engine.model_executor.constraints.lattice import OPEN

TokenOptions = dict[int, tuple[np.ndarray, np.ndarray]]
"""By position, the tokens that may follow the tokens before, and their
log-probabilities among accepted texts.
"""


class RunningDecision:
    """A decision of one request, over one or several passes."""

    def __init__(
        self, texts: AcceptedTexts, end_tokens: frozenset[int], passes: int
    ) -> None:
        """``passes``: the most forward passes."""
        self.texts, self.decision, self.lattice = texts, texts.decision, texts.lattice
        self._ends = sorted(end_tokens)
        self.columns = np.array([*self.decision.tokens.tolist(), *self._ends])
        """Tokens whose log-probabilities ``commit`` reads."""
        self._answers: dict[int, dict[str, Any]] = {}
        self._left = list(range(len(self.decision.names)))
        self._passes_left = passes
        self._allowed = np.ones(len(self.lattice.tokens), bool)

    @property
    def answers(self) -> dict[str, dict[str, Any]]:
        """Value, probability, distribution and label mass of each committed field, in
        field order.
        """
        return {
            self.decision.names[field]: self._answers[field]
            for field in sorted(self._answers)
        }

    @property
    def is_complete(self) -> bool:
        """True if all fields are committed."""
        return not self._left

    def commit(
        self,
        positions: Sequence[int],
        logprobs: np.ndarray,
        *,
        with_logprobs: bool = False,
    ) -> tuple[dict[int, int], TokenOptions]:
        """Commit the surest fields, or in the last pass all remaining ones. Returns the
        tokens that this decides by position, and with ``with_logprobs`` the options of
        these positions.

        Args:
            positions: positions of all masks in the response.
            logprobs: log-probabilities of ``columns`` under the softmax over the whole
                vocabulary, float64 ``[num_masks, num_columns]``; finite.
        """
        lattice = self.lattice
        num_tokens = len(self.decision.tokens)
        table = np.zeros((lattice.length, num_tokens + 1))
        table[positions, :num_tokens] = logprobs[:, :num_tokens]
        table[positions, num_tokens] = np.logaddexp.reduce(
            logprobs[:, num_tokens:], axis=1, initial=-np.inf
        )
        scores = np.where(
            self._allowed, table[lattice.positions, self.texts.edge_columns], -np.inf
        )
        posterior = Posterior(lattice, scores)
        path = posterior.path
        path_fields = lattice.fields[posterior.path]
        committed = (
            self._left if self._passes_left == 1 else self._surest(positions, posterior)
        )
        self._left = [field for field in self._left if field not in committed]
        self._passes_left -= 1
        for field in committed:
            field_edges = path[path_fields == field]
            answer = self.texts.fields[field].answer(posterior, field_edges)
            mass = posterior.label_mass(self.texts.edges_of_fields[field])
            self._answers[field] = answer | {"label_mass": mass}
        remaining = (
            self._tokens_left(path, committed) if self._left else lattice.tokens[path]
        )
        # The best end token of a position stands for all end tokens.
        best = np.full(lattice.length, END)
        if self._ends:
            best[positions] = np.array(self._ends)[
                logprobs[:, num_tokens:].argmax(axis=1)
            ]
        is_written = (remaining != OPEN) & ((remaining != END) | self.is_complete)
        remaining = np.where(remaining == END, best, remaining)
        tokens = {
            position: int(remaining[position])
            for position in positions
            if is_written[position]
        }
        options = (
            lattice.conditionals(path, posterior.weights, tokens)
            if with_logprobs
            else {}
        )
        return tokens, {
            p: (np.where(ids == END, best[p], ids), values)
            for p, (ids, values) in options.items()
        }

    def _surest(self, positions: Sequence[int], posterior: Posterior) -> list[int]:
        """The fields to commit in a pass that is not the last: all fields whose tokens
        are decided, and an equal share of the others. ``positions`` as for ``commit``.
        """
        lattice, path, steps = self.lattice, posterior.path, posterior.steps
        path_fields = lattice.fields[path]
        as_on_path = self._as_on_path(path)

        def sureness(field: int) -> float:
            """Log-probability that the field has its text at these positions, because a
            commit writes the text at its positions.
            """
            field_edges = path[path_fields == field]
            place = lattice.positions[field_edges[0]]
            start, stop = np.searchsorted(lattice.positions, (place, place + 1))
            first = start + np.flatnonzero(as_on_path[start:stop])
            begins = np.logaddexp.reduce(
                posterior.visits[lattice.sources[first]] + steps[first]
            )
            ends = posterior.leaves(field, int(lattice.nodes_behind[field_edges[-1]]))
            return float(begins + steps[field_edges[1:]].sum() + ends)

        undecided = {*path_fields[positions].tolist()}.intersection(self._left)
        count = max(len(undecided) // self._passes_left, 1)
        decided = [field for field in self._left if field not in undecided]
        return decided + sorted(undecided, key=sureness, reverse=True)[:count]

    def _as_on_path(self, path: np.ndarray) -> np.ndarray:
        """The edges that write the path's token at their position, bool
        ``[num_lattice_edges]``.

        There may be several per position: a text that may follow several others begins
        with an edge from each of them.
        """
        same = path[self.lattice.positions]
        columns = (self.lattice.tokens, self.lattice.fields, self.lattice.targets)
        return np.logical_and.reduce([column == column[same] for column in columns])

    def _tokens_left(self, path: np.ndarray, committed: list[int]) -> np.ndarray:
        """Allow only texts whose committed fields are those of the path, at the same
        positions. Returns the result of ``Lattice.tokens_left``.
        """
        fields = self.lattice.fields
        fixed = np.isin(fields[path], committed)[self.lattice.positions]
        self._allowed &= np.where(
            fixed, self._as_on_path(path), ~np.isin(fields, committed)
        )
        return self.lattice.tokens_left(self._allowed)
