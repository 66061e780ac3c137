"""The most probable texts of a field with a pattern, and their probabilities.

Several sequences of tokens may spell a text, and a field may begin at several
positions: the probability of a text is the sum over all of them. So the search extends
texts, not sequences of tokens. It visits one state of the pattern after the other, and
computes at once all beginnings that lead to the state.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from dllm_engine.model_executor.constraints.lattice import Lattice


class Arcs(NamedTuple):
    """Pieces of text that lead from one state to other states. All tokens with the same
    text are one piece.
    """

    pieces: np.ndarray
    """Index of each piece, ascending."""
    targets: np.ndarray
    """State after each piece."""
    positions: np.ndarray
    """Positions that the pieces may have, ascending; 0 is the first position of the
    field.
    """
    place: slice
    """Place of this state's ``[num_arcs, num_positions]`` numbers among those of all
    states.
    """


class Beginnings(NamedTuple):
    """Beginnings of texts that lead to the same state."""

    texts: list[bytes]
    chances: np.ndarray
    """``[num_texts, num_positions]``: probability that the field begins with a text,
    and that the text ends just before a position."""


Choice = Callable[[int, Beginnings], tuple[np.ndarray, np.ndarray]]
"""Maps a state and the beginnings that lead to it to the beginnings that go on, and the
arc of each. A beginning may occur with several arcs."""


class FieldLattice:
    """The part of a lattice that belongs to a field. State 0 is before the field, and
    each arc leads to a state with a larger number.
    """

    def __init__(
        self,
        lattice: Lattice,
        edges: np.ndarray,
        pieces: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        """``edges``: edges of the field, ascending. ``pieces``: index of the text of
        each edge. ``lengths``: bytes of each text."""
        sources = lattice.states[edges]
        targets = lattice.next_states[edges]
        first = int(lattice.positions[edges[0]])
        positions = lattice.positions[edges] - first
        self.lattice = lattice
        self.edges = edges
        self.longest_piece = int(lengths[pieces].max())
        self.num_positions = int(positions[-1]) + 2
        self.begins = ~np.isin(sources, targets)
        """True for each edge that begins the field."""
        states, target_of = np.unique(targets, return_inverse=True)
        # States are numbered by their last positions, because an edge from a state's
        # last position leads to a later position.
        last = np.zeros(len(states), np.int64)
        np.maximum.at(last, target_of, positions)
        number = np.empty(len(states), np.int64)
        number[np.argsort(last, kind="stable")] = np.arange(1, len(states) + 1)
        self.num_states = len(states) + 1
        targets = number[target_of]
        source_of = np.searchsorted(states, sources).clip(max=len(states) - 1)
        sources = np.where(self.begins, 0, number[source_of])
        assert (sources < targets).all()
        self._set_arcs(sources, targets, positions, pieces)
        self.end_places, ends = np.unique(
            targets * self.num_positions + positions + 1, return_index=True
        )
        """State and position of each node after an edge, as an index into
        ``[num_states, num_positions]``.
        """
        self.end_nodes = lattice.nodes_behind[edges[ends]]

    def _set_arcs(
        self,
        sources: np.ndarray,
        targets: np.ndarray,
        positions: np.ndarray,
        pieces: np.ndarray,
    ) -> None:
        states = np.arange(self.num_states + 1)
        _, firsts, arc_of = np.unique(
            sources * (int(pieces.max()) + 1) + pieces,
            return_index=True,
            return_inverse=True,
        )
        arc_bounds = np.searchsorted(sources[firsts], states)
        columns, column_of = np.unique(
            sources * self.num_positions + positions, return_inverse=True
        )
        column_bounds = np.searchsorted(columns, states * self.num_positions)
        widths = np.diff(column_bounds)
        bounds = np.concatenate(([0], np.cumsum(np.diff(arc_bounds) * widths)))
        self.arcs = []
        """Arcs from each state."""
        for state in range(self.num_states):
            arcs = firsts[slice(*arc_bounds[state : state + 2])]
            own_positions = (
                columns[slice(*column_bounds[state : state + 2])] % self.num_positions
            )
            self.arcs.append(
                Arcs(
                    pieces[arcs],
                    targets[arcs],
                    own_positions,
                    slice(*bounds[state : state + 2]),
                )
            )
        rows = arc_of - arc_bounds[sources]
        self.edge_places = (
            bounds[sources]
            + rows * widths[sources]
            + column_of
            - column_bounds[sources]
        )
        """Index of each edge in the numbers of all arcs and positions."""
        self.num_places = int(bounds[-1])


class FieldChances:
    """Probabilities of one pass in the part of a lattice that belongs to a field."""

    def __init__(
        self, field_lattice: FieldLattice, visits: np.ndarray, steps: np.ndarray
    ) -> None:
        """``visits``: log-probability that a text passes through each node. ``steps``:
        log-probability of each edge, given that the text passes through its source."""
        lattice = field_lattice.lattice
        edges = np.exp(steps[field_lattice.edges])
        edges[field_lattice.begins] *= np.exp(
            visits[lattice.sources[field_lattice.edges[field_lattice.begins]]]
        )
        places = np.bincount(field_lattice.edge_places, edges, field_lattice.num_places)
        self.lattice = field_lattice
        self.arcs = [
            places[arc.place].reshape(len(arc.pieces), len(arc.positions))
            for arc in field_lattice.arcs
        ]
        """``[num_arcs, num_positions]`` of each state: probability of an arc, given
        that the text passes through the state at this position; from state 0, times the
        probability that the field begins there."""
        leaving, counts = lattice.edges_from_each(field_lattice.end_nodes)
        owners = np.repeat(np.arange(len(counts)), counts)
        others = lattice.fields[leaving] != lattice.fields[field_lattice.edges[0]]
        ends = np.bincount(owners[others], np.exp(steps[leaving[others]]), len(counts))
        self.ends = np.zeros((field_lattice.num_states, field_lattice.num_positions))
        """Probability that the field ends at a state and a position, given that the
        text passes through them.
        """
        self.ends.flat[field_lattice.end_places] = np.where(counts == 0, 1.0, ends)
        self.best = self.ends.copy()
        """Probability of the most probable pieces from a state and a position to the
        end of the field.
        """
        for state in reversed(range(field_lattice.num_states)):
            behind = self._best_of_arcs(state)
            if behind.size:
                at = state, field_lattice.arcs[state].positions
                self.best[at] = np.maximum(self.best[at], behind.max(axis=0))

    def most_probable_texts(
        self, spellings: Sequence[bytes], limit: int
    ) -> list[bytes]:
        """The most probable texts, at most ``limit``. A text with many improbable
        spellings may be missing.

        From each state, only the ``limit`` beginnings with the most probable best
        spelling go on.

        Args:
            spellings: text of each piece.
        """
        complete: dict[bytes, float] = {}
        for state, reached in self._beginnings(
            spellings, partial(self.choose, limit=limit), limit
        ):
            complete |= self._complete(state, reached)
        return sorted(complete, key=lambda text: (-complete[text], text))[:limit]

    def choose(
        self, state: int, reached: Beginnings, limit: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose the most probable beginnings with one more arc, at most ``limit``, like
        ``Choice``.
        """
        behind = self._best_of_arcs(state)
        used = np.arange(len(behind))
        if len(behind) > limit * behind.shape[1]:
            # At each position, other beginnings cannot lead to one of the best texts.
            used = np.unique(np.argpartition(-behind, limit, axis=0)[:limit])
        chances = (
            reached.chances[:, self.lattice.arcs[state].positions] @ behind[used].T
        )
        likeliest = _largest(chances.ravel(), limit)
        likeliest = likeliest[chances.flat[likeliest] > 0]
        rows, columns = np.divmod(likeliest, len(used))
        return rows, used[columns]

    def probabilities(
        self,
        texts: Sequence[bytes],
        spellings: Sequence[bytes],
        numbers: dict[bytes, int],
    ) -> dict[bytes, float]:
        """The probability of each text, summed over all of its spellings.

        ``spellings``: text of each piece; ``numbers``: index of each piece by its text.
        """
        beginnings = {text[:stop] for text in texts for stop in range(1, len(text) + 1)}
        pieces_behind: dict[bytes, list[int]] = defaultdict(list)
        for beginning in beginnings:
            for start in range(
                max(len(beginning) - self.lattice.longest_piece, 0), len(beginning)
            ):
                piece = numbers.get(beginning[start:])
                if piece is not None:
                    pieces_behind[beginning[:start]].append(piece)

        def choose(state: int, reached: Beginnings) -> tuple[np.ndarray, np.ndarray]:
            pieces = [pieces_behind.get(text, []) for text in reached.texts]
            rows = np.repeat(np.arange(len(pieces)), [len(row) for row in pieces])
            next_pieces = np.fromiter(chain.from_iterable(pieces), np.int64, len(rows))
            state_pieces = self.lattice.arcs[state].pieces
            arcs = np.searchsorted(state_pieces, next_pieces)
            arcs[arcs == len(state_pieces)] = 0
            leads = (
                state_pieces[arcs] == next_pieces
                if len(state_pieces)
                else np.zeros(0, bool)
            )
            return rows[leads], arcs[leads]

        complete: dict[bytes, float] = {}
        for state, reached in self._beginnings(spellings, choose):
            complete |= self._complete(state, reached)
        return {text: min(complete.get(text, 0.0), 1.0) for text in texts}

    def _beginnings(
        self, spellings: Sequence[bytes], choose: Choice, limit: int | None = None
    ) -> Iterator[tuple[int, Beginnings]]:
        """Beginnings of texts by the state that they lead to. ``limit``: number per
        state, for the most promising ones.
        """
        lattice = self.lattice
        width = self.lattice.num_positions
        rows_of: list[dict[bytes, int]] = [{} for _ in range(lattice.num_states)]
        """Row of each beginning, per state that it leads to."""
        arriving: list[list[tuple[np.ndarray, np.ndarray]]] = [
            [] for _ in range(lattice.num_states)
        ]
        """Indices into ``[num_texts, num_positions]`` and the probabilities that are
        added there, per state.
        """
        rows_of[0][b""] = 0
        arriving[0].append((np.arange(width), np.ones(width)))
        for state, arcs in enumerate(lattice.arcs):
            texts = [*rows_of[state]]
            if not texts:
                continue
            places, added = (
                np.concatenate(parts) for parts in zip(*arriving[state], strict=True)
            )
            chances = np.bincount(places, added, len(texts) * width).reshape(
                len(texts), width
            )
            rows_of[state], arriving[state] = {}, []
            if limit is not None and len(texts) > limit:
                best = _largest(chances @ self.best[state], limit)
                texts = [texts[row] for row in best.tolist()]
                chances = chances[best]
            reached = Beginnings(texts, chances)
            yield state, reached
            if not len(arcs.pieces):
                continue
            rows, next_arcs = choose(state, reached)
            following = (
                chances[rows[:, None], arcs.positions] * self.arcs[state][next_arcs]
            )
            targets = arcs.targets[next_arcs]
            order = np.argsort(targets, kind="stable")
            for group in (
                np.split(order, np.flatnonzero(np.diff(targets[order])) + 1)
                if len(order)
                else ()
            ):
                target = int(targets[group[0]])
                index = rows_of[target]
                pairs = zip(
                    rows[group].tolist(),
                    arcs.pieces[next_arcs[group]].tolist(),
                    strict=True,
                )
                target_rows = [
                    index.setdefault(texts[row] + spellings[piece], len(index))
                    for row, piece in pairs
                ]
                places = np.array(target_rows)[:, None] * width + arcs.positions + 1
                arriving[target].append((places.ravel(), following[group].ravel()))

    def _complete(self, state: int, reached: Beginnings) -> dict[bytes, float]:
        """Beginnings that are complete texts, and their probabilities."""
        chances = reached.chances @ self.ends[state]
        return {
            reached.texts[row]: float(chances[row])
            for row in np.flatnonzero(chances).tolist()
        }

    def _best_of_arcs(self, state: int) -> np.ndarray:
        """Probability of each arc from a state followed by the most probable pieces,
        ``[num_arcs, num_positions]``.
        """
        arcs = self.lattice.arcs[state]
        behind = self.best[arcs.targets[:, None], arcs.positions + 1]
        return self.arcs[state] * behind


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the ``count`` largest values, or of all values if there are fewer;
    ascending.
    """
    if len(values) <= count:
        return np.arange(len(values))
    return np.sort(np.argpartition(-values, count)[:count])
