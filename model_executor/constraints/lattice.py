"""Sums and maxima over all sequences of tokens that a graph spells in a given number of
positions.
"""

from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dllm_engine.constraints.graph import Graph

OPEN = -2
"""Marks a position that may hold several tokens."""


class Level(NamedTuple):
    """Edges at the same distance from the start of their segments, grouped by the node
    where their values are joined.
    """

    edges: np.ndarray
    nodes: np.ndarray
    """Nodes where edges are joined, ascending."""
    firsts: np.ndarray
    """Index of the first edge of each node."""


def _levels(level: np.ndarray, near: np.ndarray) -> list[Level]:
    """Levels in ascending order. ``level``, ``near``: level of each edge, and the node
    where it is joined. A node is in one level only.
    """
    order = np.lexsort((near, level))
    joined = near[order]
    firsts = np.flatnonzero(np.diff(joined, prepend=-1))
    starts = np.searchsorted(level[order], np.arange(level.max() + 2))
    bounds = np.searchsorted(firsts, starts)
    return [
        Level(order[start:stop], joined[firsts[i:j]], firsts[i:j] - start)
        for (start, stop), (i, j) in zip(
            pairwise(starts.tolist()), pairwise(bounds.tolist()), strict=True
        )
    ]


class Lattice:
    """All sequences of a graph, padded with end tokens to the length of the longest
    one.

    A node is a state before a position. The lattice is cut into segments at each node
    that all sequences pass through. Segments are independent, so one sweep over levels,
    which count positions from the start of a segment, computes all of them. A cut node
    is stored twice: as the last node of one segment, and as the first node of the next.
    """

    def __init__(self, graph: Graph) -> None:
        self.positions, edges = graph.placed_edges()
        """Position of each edge, ascending."""
        num_states = graph.final + 1
        self.length = graph.length
        self.tokens = edges["token"].copy()
        self.fields = edges["field"].copy()
        self.choices = edges["choice"].copy()
        """Token, field and choice of each edge, as in the graph."""
        self.states = edges["source"].astype(np.int64)
        self.next_states = edges["target"].astype(np.int64)
        """States of the graph before and after each edge."""
        # All states are merged at the end.
        next_states = np.where(
            self.positions == self.length - 1, graph.final, self.next_states
        )
        bounds = np.searchsorted(self.positions, np.arange(self.length + 1))
        is_cut = np.append(
            self.states[bounds[:-1]] == self.states[bounds[1:] - 1], True
        )
        self.segments = is_cut.cumsum()[self.positions] - 1
        """Segment of each edge."""
        source_keys = self.positions * num_states + self.states
        target_keys = (self.positions + 1) * num_states + next_states
        # The last node of a segment is separate from the first node of the next.
        closes_segment = is_cut[self.positions + 1]
        target_keys[closes_segment] += (self.length + 1) * num_states
        keys, nodes = np.unique(
            np.concatenate((source_keys, target_keys)), return_inverse=True
        )
        self.sources, self.targets = np.split(nodes, 2)
        """Nodes of each edge; the sources ascend."""
        self.first_edges = np.searchsorted(self.sources, np.arange(len(keys) + 1))
        """Index of the first edge that leaves each node."""
        level = self.positions - np.flatnonzero(is_cut)[self.segments]
        self._forward = _levels(level, self.targets)
        self._backward = _levels(level, self.sources)[::-1]
        self.opens = np.unique(self.sources[level == 0])
        """First node of each segment."""
        self.closes = np.unique(self.targets[closes_segment])
        """Last node of each segment."""
        following = np.arange(len(keys))
        following[self.closes[:-1]] = self.opens[1:]
        self.nodes_behind = following[self.targets]
        """The node after each edge; at the end of a segment the first node of the next
        segment.
        """

    def log_sums(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logs of the sums over all paths from the start of a segment to each node, and
        from each node to the end of its segment.

        ``[num_nodes]`` each. ``scores``: ``[num_lattice_edges]``; the score of a path
        is their sum.
        """
        before = self._sweep(
            np.logaddexp, scores, self.opens, self.sources, self._forward
        )
        return before, self._sweep(
            np.logaddexp, scores, self.closes, self.targets, self._backward
        )

    def best_path(self, scores: np.ndarray) -> np.ndarray:
        """The edges of the path with the largest score, one per position, int64
        ``[length]``.
        """
        best = self._sweep(
            np.maximum, scores, self.closes, self.targets, self._backward
        )
        totals = scores + best[self.targets]
        path = np.empty(self.length, np.int64)
        node = self.opens[0]
        for position in range(self.length):
            first, stop = self.first_edges[node : node + 2]
            path[position] = edge = first + totals[first:stop].argmax()
            node = self.nodes_behind[edge]
        return path

    def _sweep(
        self,
        join: np.ufunc,
        scores: np.ndarray,
        begins: np.ndarray,
        far: np.ndarray,
        levels: list["Level"],
    ) -> np.ndarray:
        """The ``join`` of the scores of all paths between the nodes ``begins`` and each
        node, ``[num_nodes]``; −∞ if there is no path. Each edge carries a value from
        its ``far`` node to its near node, level by level."""
        values = np.full(len(self.first_edges) - 1, -np.inf)
        values[begins] = 0.0
        for edges, nodes, firsts in levels:
            values[nodes] = join.reduceat(values[far[edges]] + scores[edges], firsts)
        return values

    def tokens_left(self, allowed: np.ndarray) -> np.ndarray:
        """The token of each position in all sequences of ``allowed`` edges (bool
        ``[num_lattice_edges]``), int64 ``[length]``; ``OPEN`` if the sequences differ.
        """
        scores = np.where(allowed, 0.0, -np.inf)
        before, after = self.log_sums(scores)
        alive = np.isfinite(before[self.sources] + scores + after[self.targets])
        left = np.full(self.length, OPEN, np.int64)
        left[self.positions[alive]] = self.tokens[alive]
        left[self.positions[alive & (self.tokens != left[self.positions])]] = OPEN
        return left

    def edges_from(self, node: int) -> np.ndarray:
        """The edges that leave a node."""
        return np.arange(*self.first_edges[node : node + 2])

    def edges_from_each(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The edges that leave each of some nodes, node by node, and their number per
        node.
        """
        firsts = self.first_edges[nodes]
        counts = self.first_edges[nodes + 1] - firsts
        return np.arange(counts.sum()) + np.repeat(
            firsts - np.cumsum(counts) + counts, counts
        ), counts

    def conditionals(
        self, path: np.ndarray, weights: np.ndarray, positions: Collection[int]
    ) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """For each of some positions, the tokens that may follow the path's tokens
        before it, and their log-probabilities.

        ``weights``: score of each edge, plus the log of the sum over all paths behind
        it.
        """
        options = {}
        nodes = self.opens[:1]
        for position, edge in enumerate(
            path[: max(positions, default=-1) + 1].tolist()
        ):
            leaving, _ = self.edges_from_each(nodes)
            if position in positions:
                tokens, token_of = np.unique(self.tokens[leaving], return_inverse=True)
                logs = np.full(len(tokens), -np.inf)
                np.logaddexp.at(logs, token_of, weights[leaving])
                options[position] = tokens, logs - np.logaddexp.reduce(logs)
            nodes = np.unique(
                self.nodes_behind[leaving[self.tokens[leaving] == self.tokens[edge]]]
            )
        return options
