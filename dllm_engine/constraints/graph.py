"""Graphs of tokens: the sequences that a decision accepts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

END = -1
"""Token id that stands for any end token."""
LITERAL = -1
"""Field of an edge outside all fields; choice of an edge that does not begin a choice.
"""
EDGE = np.dtype(
    [(name, np.int32) for name in ("source", "token", "target", "field", "choice")]
)
"""An edge between two states of a graph, the index of its field, and the index of the
choice that it begins; ``LITERAL`` if there is none."""


def edges_between(
    source: ArrayLike,
    token: ArrayLike,
    target: ArrayLike,
    field: ArrayLike,
    choice: ArrayLike = LITERAL,
) -> np.ndarray:
    """Make edges from columns, which are broadcast; ``EDGE`` ``[num_edges]``."""
    columns = {
        "source": source,
        "token": token,
        "target": target,
        "field": field,
        "choice": choice,
    }
    edges = np.empty(np.broadcast(*columns.values()).shape, EDGE)
    for name, column in columns.items():
        edges[name] = column
    return edges


def joined(edges: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate edges, ``EDGE`` ``[num_edges]``."""
    # Without the type, NumPy takes three times as long.
    return np.concatenate(edges, dtype=EDGE)


def states_reached(
    sources: np.ndarray, targets: np.ndarray, begins: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield the states that 0, 1, 2, … edges lead to from ``begins``, bool
    ``[num_states]`` each, as long as there are any."""
    reached = begins
    while reached.any():
        yield reached
        following = np.zeros_like(reached)
        following[targets[reached[sources]]] = True
        reached = following


@dataclass(frozen=True, eq=False)
class Graph:
    """Acyclic graph. Its paths from state 0 to one of ``ends`` are the accepted
    sequences, each once. Every state is on such a path.
    """

    ends: np.ndarray
    """int64 ``[num_ends]``"""
    edges: np.ndarray
    """``EDGE`` ``[num_edges]``"""

    @cached_property
    def reached(self) -> list[np.ndarray]:
        """States that 0, 1, 2, … tokens lead to, bool ``[num_states]`` each."""
        start = np.arange(self.edges["target"].max() + 1) == 0
        return [*states_reached(self.edges["source"], self.edges["target"], start)]

    @cached_property
    def num_positions(self) -> np.ndarray:
        """Number of positions at which each state occurs, int64 ``[num_states]``."""
        return np.sum(self.reached, axis=0)

    @property
    def length(self) -> int:
        """Length of the longest sequence, in tokens."""
        return len(self.reached) - 1

    @property
    def final(self) -> int:
        """The additional state after end tokens, which pad shorter sequences. No edge
        of the graph leads there.
        """
        return len(self.reached[0])

    def placed_edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Edges of accepted sequences at each position, with end tokens behind shorter
        sequences: positions, int64 ascending, and ``EDGE``, whose sources ascend at
        each position.
        """
        closing = [*self.ends.tolist(), self.final]
        closed = edges_between(closing, END, self.final, LITERAL)
        edges = joined([self.edges, closed])
        edges = edges[np.argsort(edges["source"], kind="stable")]
        reached = np.array(self.reached[: self.length])
        is_ended = np.append(False, reached[:-1, self.ends].any(axis=1).cumsum() > 0)
        positions, states = np.column_stack((reached, is_ended)).nonzero()
        firsts = np.searchsorted(edges["source"], np.arange(self.final + 2))
        counts = np.diff(firsts)[states]
        shifts = firsts[states] - (counts.cumsum() - counts)
        placed = np.arange(counts.sum()) + np.repeat(shifts, counts)
        return np.repeat(positions, counts), edges[placed]

    @property
    def size(self) -> int:
        """Total number of edges at all positions: an upper bound of the lattice's
        edges.
        """
        return int(self.num_positions[self.edges["source"]].sum())
