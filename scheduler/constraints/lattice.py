"""Sums and maxima over all sequences of tokens that a graph spells in a given number of positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

END = -1
"""Number that stands for any end token."""
OPEN = -2
"""Number of a position that may hold several tokens."""


class Sweep(NamedTuple):
    """The edges of one level, grouped by the node at one of their ends."""

    edges: np.ndarray
    starts: np.ndarray
    """First edge of each group."""
    nodes: np.ndarray
    """Node of each group."""


@dataclass(frozen=True, eq=False)
class Graph:
    """Acyclic graph whose paths from state 0 to the last state are the accepted sequences, each once."""

    sources: np.ndarray
    """int32 ``[num_edges]``"""
    tokens: np.ndarray
    """int32 ``[num_edges]``"""
    targets: np.ndarray
    """int32 ``[num_edges]``"""

    @property
    def num_states(self) -> int:
        return int(self.targets.max()) + 1

    @cached_property
    def reached(self) -> np.ndarray:
        """States that each number of tokens leads to, bool ``[longest + 1, num_states]``."""
        rows = [np.arange(self.num_states) == 0]
        while rows[-1].any():
            following = np.zeros(self.num_states, bool)
            following[self.targets[rows[-1][self.sources]]] = True
            rows.append(following)
        return np.stack(rows[:-1])

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return len(self.reached) - 1


class Lattice:
    """All sequences of a graph in as many positions as its longest one has. End tokens follow a shorter sequence.

    A node is a state before a position. Where all sequences pass through one node, the lattice falls into segments.
    They depend on nothing in each other, so one sweep over levels, which count positions from the start of a segment,
    computes all of them. The node between two segments is two nodes: the last one of the first, the first one of the
    second.
    """

    def __init__(self, graph: Graph) -> None:
        final = graph.num_states - 1
        ends = np.array([final]), np.array([END]), np.array([final])
        sources, tokens, targets = (
            np.append(own, end) for own, end in zip((graph.sources, graph.tokens, graph.targets), ends, strict=True)
        )
        reached = graph.reached.copy()
        reached[:, final] = np.logical_or.accumulate(reached[:, final])
        self.length = graph.longest
        completable = np.zeros_like(reached)
        completable[-1, final] = True
        alive = []
        for position in range(self.length - 1, -1, -1):
            leads = completable[position + 1][targets]
            completable[position][sources[leads]] = True
            alive.append(np.flatnonzero(leads & reached[position][sources]))
        self.positions = np.repeat(np.arange(self.length), [len(edges) for edges in reversed(alive)])
        """Position of each edge, ascending."""
        self.edges = np.concatenate(alive[::-1])
        """Edge of the graph; the number behind the last one for an end token."""
        self.tokens = tokens[self.edges]
        is_cut = (reached & completable).sum(axis=1) == 1
        segment_of = is_cut.cumsum() - 1
        self.segments = segment_of[self.positions]
        """Segment of each edge."""
        key, size = self.positions * graph.num_states, (self.length + 1) * graph.num_states
        source_keys, target_keys = key + sources[self.edges], key + graph.num_states + targets[self.edges]
        target_keys += size * is_cut[self.positions + 1]
        keys, nodes = np.unique(np.concatenate((source_keys, target_keys)), return_inverse=True)
        self.sources, self.targets = np.split(nodes, 2)
        self.num_nodes = len(keys)
        self.states = keys % graph.num_states
        """State of each node."""
        level = self.positions - np.flatnonzero(is_cut)[self.segments]
        self.opens = np.unique(self.sources[level == 0])
        """First node of each segment."""
        self.closes = np.unique(self.targets[is_cut[self.positions + 1]])
        """Last node of each segment."""
        self.following = np.arange(self.num_nodes)
        """For the last node of a segment, the first one of the next; for others the node itself."""
        self.following[self.closes[:-1]] = self.opens[1:]
        self.forward, self.backward = _sweeps(level, self.targets), _sweeps(-level, self.sources)
        self.by_source = np.argsort(self.sources, kind="stable")
        self.bounds = np.searchsorted(self.sources[self.by_source], np.arange(self.num_nodes + 1))
        """Where the edges from each node begin in ``by_source``."""
        self.first_edges = np.searchsorted(self.positions, np.arange(self.length))

    def log_sums(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logs of the sums over all paths from the start of a segment to each node, and from it to the end.

        ``[num_nodes]`` each. ``scores``: ``[num_lattice_edges]``; the score of a path is their sum.
        """
        before = self._swept(self.forward, self.opens, self.sources, scores)
        return before, self._swept(self.backward, self.closes, self.targets, scores)

    def _swept(self, sweeps: Sequence[Sweep], begins: np.ndarray, ends: np.ndarray, scores: np.ndarray) -> np.ndarray:
        values = np.full(self.num_nodes, -np.inf)
        values[begins] = 0.0
        for edges, starts, nodes in sweeps:
            values[nodes] = np.logaddexp.reduceat(values[ends[edges]] + scores[edges], starts)
        return values

    def best_path(self, scores: np.ndarray) -> np.ndarray:
        """The edges of a path with the largest score, one per position, int64 ``[length]``."""
        best, arrival = np.full(self.num_nodes, -np.inf), np.zeros(self.num_nodes, np.int64)
        best[self.opens] = 0.0
        for edges, starts, nodes in self.forward:
            arriving = best[self.sources[edges]] + scores[edges]
            best[nodes] = np.maximum.reduceat(arriving, starts)
            is_best = arriving == np.repeat(best[nodes], np.diff(np.append(starts, len(edges))))
            first = np.minimum.reduceat(np.where(is_best, np.arange(len(edges)), len(edges)), starts)
            arrival[nodes] = edges[first]
        path = np.empty(self.length, np.int64)
        segment_end = dict(zip(self.opens[1:].tolist(), self.closes.tolist(), strict=False))
        node = int(self.closes[-1])
        for position in range(self.length - 1, -1, -1):
            path[position] = arrival[node]
            source = int(self.sources[path[position]])
            node = segment_end.get(source, source)
        return path

    def tokens_left(self, allowed: np.ndarray) -> np.ndarray:
        """The token of each position that all sequences of ``allowed`` edges (bool ``[num_lattice_edges]``) have there,
        int64 ``[length]``; ``OPEN`` where they differ."""
        before, after = self.log_sums(np.where(allowed, 0.0, -np.inf))
        alive = allowed & np.isfinite(before[self.sources] + after[self.targets])
        most = np.iinfo(np.int64).max
        lowest = np.minimum.reduceat(np.where(alive, self.tokens, most), self.first_edges)
        highest = np.maximum.reduceat(np.where(alive, self.tokens, -most), self.first_edges)
        return np.where(lowest == highest, lowest, OPEN)

    def edges_from(self, node: int) -> np.ndarray:
        """The edges that leave a node."""
        return self.by_source[self.bounds[node] : self.bounds[node + 1]]

    def conditionals(self, path: np.ndarray, weights: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each position of a path, the tokens that may follow its tokens before, and their log-probabilities.

        ``weights``: per edge its score and the log of the sum over all paths behind it.
        """
        options, nodes = [], self.opens[:1]
        for edge in path.tolist():
            leaving = np.concatenate([self.edges_from(node) for node in nodes.tolist()])
            tokens, token_of = np.unique(self.tokens[leaving], return_inverse=True)
            logs = np.full(len(tokens), -np.inf)
            np.logaddexp.at(logs, token_of, weights[leaving])
            options.append((tokens, logs - np.logaddexp.reduce(logs)))
            nodes = np.unique(self.following[self.targets[leaving[self.tokens[leaving] == self.tokens[edge]]]])
        return options


def _sweeps(levels: np.ndarray, nodes: np.ndarray) -> list[Sweep]:
    """Groups by level, ascending, and by node."""
    order = np.lexsort((nodes, levels))
    sweeps = []
    for edges in np.split(order, np.flatnonzero(np.diff(levels[order])) + 1):
        starts = np.flatnonzero(np.diff(nodes[edges], prepend=-1))
        sweeps.append(Sweep(edges, starts, nodes[edges[starts]]))
    return sweeps
