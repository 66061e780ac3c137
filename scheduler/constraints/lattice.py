"""Sums and maxima over all sequences of tokens that a graph spells in a given number of positions."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

END = -1
"""Number that stands for any end token."""
OPEN = -2
"""Number of a position that may hold several tokens."""
LITERAL = -1
"""Field of an edge that belongs to none; choice of an edge that does not begin one."""


class Sweep:
    """An order in which edges carry values from their far ends to their near ends."""

    def __init__(self, levels: np.ndarray, near: np.ndarray, far: np.ndarray, num_nodes: int) -> None:
        """
        Args:
            levels: ascending from edge to edge of a path.
            near: node that each edge carries a value to.
            far: node that it carries the value from.
        """
        self.order = np.lexsort((near, levels))
        """Edges by level and by near end."""
        self.far, near, levels = far[self.order], near[self.order], levels[self.order]
        starts = np.flatnonzero(np.diff(near, prepend=-1))
        stops = np.append(starts[1:], len(near))
        self.bounds = np.zeros((num_nodes, 2), np.int64)
        """Of each node, where the edges to it begin and end in ``order``."""
        self.bounds[near[starts]] = np.column_stack((starts, stops))
        firsts = np.append(np.flatnonzero(np.diff(levels[starts], prepend=levels[0] - 1)), len(starts)).tolist()
        self.levels = [
            (near[starts[first:stop]], slice(starts[first], stops[stop - 1]), starts[first:stop] - starts[first])
            for first, stop in pairwise(firsts)
        ]
        """Of each level its nodes, its edges, and where those of each node begin among them."""

    def edges_to(self, node: int) -> np.ndarray:
        """The edges that carry values to a node."""
        return self.order[slice(*self.bounds[node])]

    def run(self, join: np.ufunc, begins: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """The ``join`` of the scores of all paths from the nodes ``begins`` to each node, ``[num_nodes]``; −∞ where
        none leads. ``scores``: ``[num_edges]``; that of a path is their sum."""
        values, scores = np.full(len(self.bounds), -np.inf), scores[self.order]
        values[begins] = 0.0
        for nodes, edges, starts in self.levels:
            values[nodes] = join.reduceat(values[self.far[edges]] + scores[edges], starts)
        return values


def states_reached(sources: np.ndarray, targets: np.ndarray, num_states: int) -> Iterator[np.ndarray]:
    """States that each number of edges leads to from state 0, bool ``[num_states]``, as long as there are any."""
    reached = np.arange(num_states) == 0
    while reached.any():
        yield reached
        following = np.zeros(num_states, bool)
        following[targets[reached[sources]]] = True
        reached = following


@dataclass(frozen=True, eq=False)
class Graph:
    """Acyclic graph whose paths from state 0 to one of ``ends`` are the accepted sequences, each once."""

    ends: np.ndarray
    """int32 ``[num_ends]``"""
    sources: np.ndarray
    """int32 ``[num_edges]``"""
    tokens: np.ndarray
    """int32 ``[num_edges]``"""
    targets: np.ndarray
    """int32 ``[num_edges]``"""
    fields: np.ndarray
    """int32 ``[num_edges]``: number of the field that an edge belongs to, or ``LITERAL``."""
    choices: np.ndarray
    """int32 ``[num_edges]``: number of the choice that an edge begins, or ``LITERAL``."""

    @property
    def num_states(self) -> int:
        return int(self.targets.max()) + 1

    @cached_property
    def reached(self) -> np.ndarray:
        """States that each number of tokens leads to, bool ``[longest + 1, num_states]``."""
        return np.stack([*states_reached(self.sources, self.targets, self.num_states)])

    @property
    def size(self) -> int:
        """Edges that follow each number of tokens, in all: no lattice has more."""
        return sum(int(np.count_nonzero(row[self.sources])) for row in self.reached)

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
        final, ends = graph.num_states, graph.ends
        sources = np.concatenate((graph.sources, ends, [final]))
        tokens, fields, choices = (
            np.append(column, np.full(len(ends) + 1, value))
            for column, value in ((graph.tokens, END), (graph.fields, LITERAL), (graph.choices, LITERAL))
        )
        targets = np.append(graph.targets, [final] * (len(ends) + 1))
        reached = np.column_stack((graph.reached, np.zeros(len(graph.reached), bool)))
        reached[1:, final] = np.logical_or.accumulate(reached[:-1, ends].any(axis=1))
        self.length = graph.longest
        completable = np.zeros_like(reached)
        completable[-1, [*ends, final]] = True
        alive = []
        for position in range(self.length - 1, -1, -1):
            leads = completable[position + 1][targets]
            completable[position][sources[leads]] = True
            alive.append(np.flatnonzero(leads & reached[position][sources]))
        self.positions = np.repeat(np.arange(self.length), [len(edges) for edges in reversed(alive)])
        """Position of each edge, ascending."""
        edges = np.concatenate(alive[::-1])
        self.tokens, self.fields, self.choices = tokens[edges], fields[edges], choices[edges]
        """Of each edge, those of the graph's."""
        # At the end all states are one.
        next_states = np.where(self.positions == self.length - 1, final, targets[edges])
        is_cut = (reached & completable).sum(axis=1) == 1
        is_cut[-1] = True
        segment_of = is_cut.cumsum() - 1
        self.segments = segment_of[self.positions]
        """Segment of each edge."""
        num_states = final + 1
        source_keys = self.positions * num_states + sources[edges]
        target_keys = (self.positions + 1) * num_states + next_states
        target_keys += (self.length + 1) * num_states * is_cut[self.positions + 1]
        keys, nodes = np.unique(np.concatenate((source_keys, target_keys)), return_inverse=True)
        self.sources, self.targets = np.split(nodes, 2)
        level = self.positions - np.flatnonzero(is_cut)[self.segments]
        self.opens = np.unique(self.sources[level == 0])
        """First node of each segment."""
        self.closes = np.unique(self.targets[is_cut[self.positions + 1]])
        """Last node of each segment."""
        self.following = np.arange(len(keys))
        """For the last node of a segment, the first one of the next; for others the node itself."""
        self.following[self.closes[:-1]] = self.opens[1:]
        self.forward = Sweep(level, self.targets, self.sources, len(keys))
        self.backward = Sweep(-level, self.sources, self.targets, len(keys))
        self.first_edges = np.searchsorted(self.positions, np.arange(self.length))

    def log_sums(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logs of the sums over all paths from the start of a segment to each node, and from it to the end.

        ``[num_nodes]`` each. ``scores``: ``[num_lattice_edges]``; the score of a path is their sum.
        """
        return (
            self.forward.run(np.logaddexp, self.opens, scores),
            self.backward.run(np.logaddexp, self.closes, scores),
        )

    def best_path(self, scores: np.ndarray) -> np.ndarray:
        """The edges of a path with the largest score, one per position, int64 ``[length]``."""
        best = self.forward.run(np.maximum, self.opens, scores)
        path = np.empty(self.length, np.int64)
        segment_end = dict(zip(self.opens[1:].tolist(), self.closes.tolist(), strict=False))
        node = int(self.closes[-1])
        for position in range(self.length - 1, -1, -1):
            edges = self.forward.edges_to(node)
            if len(edges) > 1:
                edges = edges[(best[self.sources[edges]] + scores[edges]).argmax() :]
            path[position] = edges[0]
            source = int(self.sources[edges[0]])
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
        return self.backward.edges_to(node)

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
