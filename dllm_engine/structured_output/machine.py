"""Finite automata of expressions: over characters first, then over the bytes of UTF-8."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dllm_engine.structured_output.expression import (
    LAST_CODE_POINT,
    Chars,
    Either,
    Expression,
    Listed,
    Ranges,
    Repeated,
    Sequential,
)


class TooManyStatesError(ValueError):
    """A limit on states is passed."""


@dataclass(frozen=True)
class Machine:
    """A deterministic automaton; it starts in state 0, and −1 is where nothing more is accepted."""

    next_state: np.ndarray
    """int32 ``[states, symbols]``"""
    accepting: np.ndarray
    """bool ``[states]``"""

    def trimmed(self) -> "Machine":
        """Without states that the start does not reach, or that reach no accepting one; none may be left."""
        forward, backward = _neighbours(self.next_state)
        reached = _distances(forward, [0][: len(forward)]) >= 0
        kept = reached & (_distances(backward, np.flatnonzero(self.accepting)) >= 0)
        return _renamed(self, np.where(kept, np.cumsum(kept) - 1, -1), np.flatnonzero(kept))

    def minimal(self) -> "Machine":
        """With as few states as accept the same. Every state reaches an accepting one (``trimmed``)."""
        # States that are apart from the first spare a round for each character of the longest text.
        group = _distances(_neighbours(self.next_state)[1], np.flatnonzero(self.accepting))
        count = 0
        while True:
            followers = np.where(self.next_state < 0, -1, group[self.next_state])
            firsts, group = distinct_rows(np.concatenate([group[:, None], followers], axis=1))
            if len(firsts) == count:
                return _renamed(self, group, firsts)
            count = len(firsts)


def _neighbours(table: np.ndarray) -> tuple[list[list[int]], list[list[int]]]:
    """States that follow each state, and states that lead to it."""
    sources = np.repeat(np.arange(len(table)), table.shape[1])[table.ravel() >= 0]
    edges = np.unique(sources * len(table) + table[table >= 0])
    forward: list[list[int]] = [[] for _ in range(len(table))]
    backward: list[list[int]] = [[] for _ in range(len(table))]
    for edge in edges.tolist():
        source, target = divmod(edge, len(table))
        forward[source].append(target)
        backward[target].append(source)
    return forward, backward


def _distances(neighbours: list[list[int]], sources: Iterable[int]) -> np.ndarray:
    """Steps from the nearest source to each state; −1 where there is no way."""
    distance = [-1] * len(neighbours)
    queue = [int(source) for source in sources]
    for source in queue:
        distance[source] = 0
    for state in queue:  # grows as it is read
        for neighbour in neighbours[state]:
            if distance[neighbour] < 0:
                distance[neighbour] = distance[state] + 1
                queue.append(neighbour)
    return np.array(distance, np.int32)


def _renamed(machine: Machine, names: np.ndarray, kept: np.ndarray) -> Machine:
    table = machine.next_state[kept]
    names = np.append(names, -1)
    return Machine(names[table].astype(np.int32), machine.accepting[kept])


def distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each kind, in their order, and the kind of each row."""
    multipliers = np.random.default_rng(0).integers(1 << 63, size=rows.shape[1], dtype=np.uint64)
    hashes = rows.astype(np.uint64) @ multipliers
    _, firsts, kinds = np.unique(hashes, return_index=True, return_inverse=True)
    if not np.array_equal(rows[firsts[kinds]], rows):  # two rows of one hash
        _, firsts, kinds = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return firsts[order], rank[kinds]


class _Builder:
    """States with edges under a set of characters, or under none."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.free: list[list[int]] = []
        self.edges: list[list[tuple[Chars, int]]] = []

    def state(self) -> int:
        if len(self.free) >= self.most:
            raise TooManyStatesError
        self.free.append([])
        self.edges.append([])
        return len(self.free) - 1

    def add(self, expression: Expression, start: int) -> int:
        """End state of the expression that begins in ``start``."""
        match expression:
            case Chars():
                end = self.state()
                self.edges[start].append((expression, end))
                return end
            case Sequential(parts):
                for part in parts:
                    start = self.add(part, start)
                return start
            case Either(branches):
                end = self.state()
                for branch in branches:
                    self.free[self.add(branch, self._behind(start))].append(end)
                return end
            case Repeated():
                return self._repeated(expression, start)
            case Listed():
                return self._listed(expression, start)

    def _behind(self, *states: int) -> int:
        fresh = self.state()
        for state in states:
            self.free[state].append(fresh)
        return fresh

    def _repeated(self, expression: Repeated, start: int) -> int:
        least, most = expression.least, expression.most
        end, ends = self.state(), [start] if least == 0 else []
        for count in range(1, (max(least, 1) if most is None else most) + 1):
            if count > 1 and expression.separator is not None:
                start = self.add(expression.separator, start)
            entry = self._behind(start)
            start = self._behind(self.add(expression.item, entry))
            if count >= least:
                ends.append(start)
        if most is None:
            again = start if expression.separator is None else self.add(expression.separator, self._behind(start))
            self.free[again].append(entry)
        for state in ends:
            self.free[state].append(end)
        return end

    def _listed(self, expression: Listed, start: int) -> int:
        """Two rails: nothing written yet, and something written."""
        bare: int | None = self._behind(start)
        written: int | None = None
        for item, required in zip(expression.items, expression.required, strict=True):
            entry = self.state()
            if bare is not None:
                self.free[bare].append(entry)
            if written is not None:
                self.free[self.add(expression.separator, self._behind(written))].append(entry)
            after = self._behind(self.add(item, entry))
            if not required and written is not None:
                self.free[written].append(after)
            written, bare = after, None if required else bare
        return self._behind(*(state for state in (bare, written) if state is not None))


def character_machine(expression: Expression, most: int) -> tuple[Machine, np.ndarray]:
    """The minimal automaton over kinds of characters, and the kind of each code point, −1 for those that it knows
    not. Raises ``TooManyStatesError`` where that takes over ``most`` states, ``ValueError`` where
    no text is accepted."""
    builder = _Builder(most)
    start = builder.state()
    end = builder.add(expression, start)
    kinds, members = _kinds([chars for edges in builder.edges for chars, _ in edges])
    closures = [_closure(builder, state, end) for state in range(len(builder.free))]

    num_kinds = int(kinds.max(initial=-1)) + 1
    numbers = {closures[start]: 0}
    sets, rows = [closures[start]], []
    for states in sets:  # grows as it is read
        row: dict[int, set[int]] = {}
        for state in states:
            for chars, target in builder.edges[state]:
                for kind in members[id(chars)]:
                    row.setdefault(kind, set()).add(target)
        merged: dict[frozenset[int], int] = {}
        out = np.full(num_kinds, -1, np.int32)
        for kind, targets in row.items():
            key = frozenset(targets)
            if key not in merged:
                union = closures[next(iter(key))] if len(key) == 1 else frozenset().union(*(closures[t] for t in key))
                if union not in numbers:
                    if len(sets) >= most:
                        raise TooManyStatesError
                    numbers[union] = len(sets)
                    sets.append(union)
                merged[key] = numbers[union]
            out[kind] = merged[key]
        rows.append(out)
    accepting = np.array([end in states for states in sets])
    machine = Machine(np.stack(rows), accepting).trimmed()
    if not len(machine.accepting):
        raise ValueError("no text matches it")
    return machine.minimal(), kinds


def _closure(builder: _Builder, state: int, end: int) -> frozenset[int]:
    """States that are reached without a character, among those that matter."""
    seen, stack = {state}, [state]
    while stack:
        for follower in builder.free[stack.pop()]:
            if follower not in seen:
                seen.add(follower)
                stack.append(follower)
    return frozenset(state for state in seen if builder.edges[state] or state == end)


def _kinds(sets: list[Chars]) -> tuple[np.ndarray, dict[int, list[int]]]:
    """Characters that are in the same sets are one kind: the kind of each code point (−1: in no set), and the kinds of
    each set by its ``id``."""
    names: dict[Ranges, list[int]] = {}
    for name, chars in {id(chars): chars for chars in sets}.items():
        names.setdefault(chars.ranges(), []).append(name)
    edges = sorted({0} | {edge for ranges in names for first, last in ranges for edge in (first, last + 1)})
    place = {edge: i for i, edge in enumerate(edges)}
    member = np.zeros((len(edges), len(names)), np.int32)
    for i, ranges in enumerate(names):
        for first, last in ranges:
            member[place[first] : place[last + 1], i] = 1
    firsts, segment_kind = distinct_rows(member)
    known = member[firsts].any(1)
    segment_kind = np.where(known, np.cumsum(known) - 1, -1)[segment_kind]
    kinds = np.repeat(segment_kind, np.diff([*edges, max(edges[-1], LAST_CODE_POINT + 1)]))
    member = member[firsts][known]
    found = [np.flatnonzero(member[:, i]).tolist() for i in range(len(names))]
    return kinds, {name: found[i] for i, group in enumerate(names.values()) for name in group}


def byte_machine(machine: Machine, kinds: np.ndarray) -> Machine:
    """The minimal automaton over bytes that reads in UTF-8 what ``machine`` reads in characters."""
    count = len(machine.next_state)
    # ``values[x]``: where each state of ``machine`` goes with x: a kind of characters, below a node; the last is dead.
    values = np.pad(machine.next_state, ((0, 0), (0, 1)), constant_values=-1).T
    blocks = np.full(32 << 16, -1)
    blocks[: len(kinds)] = kinds
    blocks[0xD800:0xE000] = -1  # UTF-8 has no surrogates
    first_byte = np.full((256, count), -1, np.int32)
    first_byte[:128] = values[blocks[:128]]
    tables = []
    for level, (lead, number, least) in enumerate(((0xC0, 32, 0x80), (0xE0, 16, 0x800), (0xF0, 8, 0x10000))):
        # An entry of ``blocks`` stands for 64 ** level characters. A row of 64 is one node: what a byte may follow.
        blocks[: least >> (6 * level)] = -1  # they have a shorter form
        rows = blocks.reshape(-1, 64)
        firsts, node = distinct_rows(rows)
        followers = values[rows[firsts]].transpose(0, 2, 1).reshape(-1, 64)
        firsts, state = distinct_rows(followers)
        table = followers[firsts]
        alive = (table >= 0).any(1)
        state = np.where(alive, count + np.cumsum(alive) - 1, -1)[state].reshape(-1, values.shape[1])
        tables.append(np.pad(table[alive], ((0, 0), (0x80, 0x40)), constant_values=-1))
        count += int(alive.sum())
        first_byte[lead : lead + number] = state[node[:number]]
        values = np.concatenate([state, np.full((1, state.shape[1]), -1)])
        blocks = node
    accepting = np.zeros(count, bool)
    accepting[: len(machine.accepting)] = machine.accepting
    return Machine(np.concatenate([first_byte.T, *tables]).astype(np.int32), accepting)
