"""Texts of a field with a pattern, and their probabilities. A text may be spelled by several sequences of tokens."""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from itertools import count

import numpy as np

from dllm_engine.scheduler.constraints.lattice import Lattice

_PATHS_PER_TEXT = 40
"""Beginnings of sequences that a search looks at for each of the most probable texts."""


class FieldTexts:
    """Texts that the edges of one field spell in a lattice."""

    def __init__(self, lattice: Lattice, is_own: np.ndarray, columns: np.ndarray, spellings: Sequence[bytes]) -> None:
        """
        Args:
            is_own: bool ``[num_lattice_edges]``: True for an edge of the field.
            columns: index into ``spellings`` of each edge.
            spellings: bytes of each token.
        """
        self.lattice, self.is_own, self.columns, self.spellings = lattice, is_own, columns, spellings
        self.column_of = {text: column for column, text in enumerate(spellings) if text}
        self.longest = max(map(len, spellings))
        self.starts = np.setdiff1d(lattice.sources[is_own], lattice.following[lattice.targets[is_own]])
        """Nodes before the field."""
        edges = np.flatnonzero(is_own)
        keys = lattice.sources[edges] * len(spellings) + columns[edges]
        self._edge_of = dict(zip(keys.tolist(), edges.tolist(), strict=True))

    def text_of(self, edges: np.ndarray) -> bytes:
        """The text that edges spell."""
        return b"".join(self.spellings[column] for column in self.columns[edges].tolist())

    def top(self, visits: np.ndarray, steps: np.ndarray, top_k: int, wanted: bytes) -> list[tuple[bytes, float]]:
        """The most probable texts, most probable first, with ``wanted`` among them, and their probabilities.

        The probabilities are exact. The search is bounded, so that a text of many improbable spellings may be missing.

        Args:
            visits: log-probability that a text passes through each node, ``[num_nodes]``.
            steps: log-probability of each edge, given that its source is passed through, ``[num_lattice_edges]``.
        """
        probabilities = {wanted: self._probability(visits, steps, wanted)}
        numbers = count()
        queue = [(-visits[node], next(numbers), int(node), b"") for node in self.starts]
        heapq.heapify(queue)
        for _ in range(_PATHS_PER_TEXT * top_k):
            best = heapq.nlargest(top_k, probabilities.values())
            # No other text is more probable than all others together.
            if not queue or (len(best) == top_k and best[-1] >= 1 - sum(probabilities.values())):
                break
            cost, _, node, text = heapq.heappop(queue)
            if node < 0:
                if text not in probabilities:
                    probabilities[text] = self._probability(visits, steps, text)
                continue
            leaving = self.lattice.edges_from(node)
            own = leaving[self.is_own[leaving]]
            if text and (leaves := self.leaves(node, steps)) > -np.inf:
                heapq.heappush(queue, (cost - leaves, next(numbers), -1, text))
            # Through fewer than the best of a node's edges no more texts can be among the best.
            for edge in own[np.argsort(-steps[own])][: top_k + len(probabilities)].tolist():
                target = int(self.lattice.following[self.lattice.targets[edge]])
                spelled = text + self.spellings[self.columns[edge]]
                heapq.heappush(queue, (cost - steps[edge], next(numbers), target, spelled))
        ranked = sorted(probabilities.items(), key=lambda each: (-each[1], each[0] != wanted))[:top_k]
        if wanted not in dict(ranked):
            ranked[-1] = wanted, probabilities[wanted]
        return ranked

    def _probability(self, visits: np.ndarray, steps: np.ndarray, text: bytes) -> float:
        """Sum over all spellings of a text."""
        masses: list[defaultdict[int, float]] = [defaultdict(float) for _ in range(len(text) + 1)]
        for node in self.starts.tolist():
            masses[0][node] = float(np.exp(visits[node]))
        for start in range(len(text)):
            for node, mass in masses[start].items():
                for stop in range(start + 1, min(start + self.longest, len(text)) + 1):
                    column = self.column_of.get(text[start:stop])
                    edge = None if column is None else self._edge_of.get(node * len(self.spellings) + column)
                    if edge is not None:
                        target = int(self.lattice.following[self.lattice.targets[edge]])
                        masses[stop][target] += mass * float(np.exp(steps[edge]))
        return min(sum(mass * float(np.exp(self.leaves(node, steps))) for node, mass in masses[-1].items()), 1.0)

    def leaves(self, node: int, steps: np.ndarray) -> float:
        """Log-probability that the field ends at a node."""
        leaving = self.lattice.edges_from(node)
        if node == self.lattice.closes[-1]:
            return 0.0
        return float(np.logaddexp.reduce(steps[leaving[~self.is_own[leaving]]], initial=-np.inf))
