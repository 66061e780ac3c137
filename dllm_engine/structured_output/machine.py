"""Finite automata of expressions, over the bytes of UTF-8."""

from functools import cache
from typing import NamedTuple

import numpy as np

from dllm_engine.scheduler.constraints.automaton import FAR, distances
from dllm_engine.structured_output.expression import (
    Bytes,
    Chars,
    Either,
    Expression,
    Listed,
    Ranges,
    Repeated,
)

_LEADS = ((0, 128, 0), (0xC0, 32, 0x80), (0xE0, 16, 0x800), (0xF0, 8, 0x10000))
"""Characters of one to four bytes: their lowest first byte, the number of first bytes, the first character."""


class TooManyStatesError(ValueError):
    """A limit on states is passed."""


class Machine(NamedTuple):
    """A deterministic automaton; it starts in state 0, and −1 is where nothing more is accepted."""

    next_state: np.ndarray
    """int32 ``[states, symbols]``"""
    accepting: np.ndarray
    """bool ``[states]``"""


def minimal(machine: Machine) -> Machine:
    """The machine of fewest states that accepts the same; without states where it accepts nothing."""
    num_states = len(machine.accepting)
    states, symbols = np.nonzero(machine.next_state >= 0)
    edges = np.unique(states * num_states + machine.next_state[states, symbols])
    sources, targets = np.divmod(edges, num_states)
    # States that are apart from the first spare a round for each character of the longest text.
    group = distances(targets, sources, machine.accepting)
    kept = (group < FAR) & (distances(sources, targets, np.arange(num_states) == 0) < FAR)
    group = np.append(np.where(kept, group, -1), -1).astype(np.int32)
    num_groups = 0
    while True:
        rows = np.column_stack([group[:-1], group[machine.next_state]])[kept]
        firsts, group[:-1][kept] = distinct_rows(rows)
        if len(firsts) == num_groups:
            break
        num_groups = len(firsts)
    firsts = np.flatnonzero(kept)[firsts]
    return Machine(group[machine.next_state[firsts]], machine.accepting[firsts])


def distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each kind, in their order, and the kind of each row."""
    multipliers = np.random.default_rng(0).integers(1 << 63, size=rows.shape[1], dtype=np.uint64)
    hashes = rows.astype(np.uint64) @ multipliers
    _, firsts, kinds = np.unique(hashes, return_index=True, return_inverse=True)
    if not np.array_equal(rows[firsts[kinds]], rows):  # two rows of one hash
        _, firsts, kinds = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    return firsts[order], np.argsort(order)[kinds]


@cache
def _utf8(ranges: Ranges) -> Expression:
    """A character of a set, as bytes."""
    held = np.zeros(8 << 18, bool)
    for first, last in ranges:
        held[first : last + 1] = True
    held[0xD800:0xE000] = False  # UTF-8 has no surrogates
    branches: list[Expression] = []
    for tail, (lead, count, least) in enumerate(_LEADS):
        held[:least] = False  # they have a shorter form
        branches += _bytes(held[: count << (6 * tail)].tobytes(), lead, count)
    return branches[0] if len(branches) == 1 else Either(branches)


def _bytes(held: bytes, lead: int, count: int) -> list[Expression]:
    """The characters that ``held`` says are in a set; the first byte of each is one of ``count`` from ``lead`` on."""
    size = len(held) // count
    leads: dict[bytes, list[int]] = {}
    for i in range(count):
        leads.setdefault(held[i * size : (i + 1) * size], []).append(lead + i)
    return [
        Bytes(tuple(values)) if size == 1 else (Bytes(tuple(values)), Either(_bytes(behind, 0x80, 64)))
        for behind, values in leads.items()
        if b"\1" in behind
    ]


class _Rests:
    """All rests of the texts of an expression, which are the states of an automaton that is not deterministic.

    A rest is what is left of an expression, and the number of the rest behind it. What is done of an expression are
    parts of a sequence or a repetition; of a list, twice the items that are passed, and one more if any is written.
    Rest 0 is the end.
    """

    def __init__(self, expression: Expression, most: int) -> None:
        self.most = most
        self.rests: list[tuple[Expression, int, int]] = [((), 0, 0)]
        self.numbers: dict[tuple[int, int, int], int] = {}
        self.start = self.number(expression, 0, 0)
        self.next = [self._next(*rest) for rest in self.rests]  # which grow as they are read
        """By number, the rests that follow without a byte between."""

    def number(self, expression: Expression, done: int, behind: int) -> int:
        if isinstance(expression, tuple) and done == len(expression):
            return behind
        if isinstance(expression, Chars):
            expression = _utf8(expression.ranges)
        key = (id(expression), done, behind)
        if key not in self.numbers:
            if len(self.rests) >= self.most:
                raise TooManyStatesError
            self.numbers[key] = len(self.rests)
            self.rests.append((expression, done, behind))
        return self.numbers[key]

    def _next(self, expression: Expression, done: int, behind: int) -> list[int]:
        match expression:
            case tuple() if expression:
                return [self.number(expression[done], 0, self.number(expression, done + 1, behind))]
            case Either(branches):
                return [self.number(branch, 0, behind) for branch in branches]
            case Repeated(item, least, most, separator):
                rests = [behind] if done >= least else []
                if most is None or done < most:
                    count = done + 1 if most is not None else min(done + 1, max(least, 1))
                    after = self.number(expression, count, behind)
                    rests.append(self._separated(item, separator if done else None, after))
                return rests
            case Listed(items, separator):
                index, is_written = divmod(done, 2)
                if index == len(items):
                    return [behind]
                item, is_required = items[index]
                after = self.number(expression, 2 * index + 3, behind)
                rests = [self._separated(item, separator if is_written else None, after)]
                return rests if is_required else [*rests, self.number(expression, done + 2, behind)]
        return []

    def _separated(self, item: Expression, separator: Expression | None, behind: int) -> int:
        entry = self.number(item, 0, behind)
        return entry if separator is None else self.number(separator, 0, entry)

    def closure(self, number: int) -> frozenset[int]:
        """The rests that begin with a byte, and the end, which a rest may be without a byte read."""
        seen, numbers = {number}, [number]
        for each in numbers:  # grows as it is read
            fresh = [rest for rest in self.next[each] if rest not in seen]
            seen.update(fresh)
            numbers += fresh
        return frozenset(each for each in seen if not each or isinstance(self.rests[each][0], Bytes))


def byte_machine(expression: Expression, most: int) -> Machine:
    """The automaton over bytes. Raises ``TooManyStatesError`` where it has over ``most`` states."""
    rests = _Rests(expression, 8 * most)
    sets = {id(first): first for first, _, _ in rests.rests if isinstance(first, Bytes)}
    member = np.zeros((256, len(sets)), np.int32)
    for i, byte_set in enumerate(sets.values()):
        member[list(byte_set.values), i] = 1
    firsts, kind_of = distinct_rows(member)
    kinds = {name: np.flatnonzero(column).tolist() for name, column in zip(sets, member[firsts].T, strict=True)}
    closure = cache(rests.closure)
    states = [closure(rests.start)]
    numbers = {states[0]: 0}

    @cache
    def state_of(begun: frozenset[int]) -> int:
        state = frozenset().union(*map(closure, begun))
        if state not in numbers:
            if len(states) >= most:
                raise TooManyStatesError
            numbers[state] = len(states)
            states.append(state)
        return numbers[state]

    table = []
    for state in states:  # grows as it is read
        begun: list[set[int]] = [set() for _ in firsts]
        for first, _, behind in (rests.rests[number] for number in state if number):
            for kind in kinds[id(first)]:
                begun[kind].add(behind)
        table.append(np.array([state_of(frozenset(behind)) if behind else -1 for behind in begun], np.int32))
    return Machine(np.stack(table)[:, kind_of], np.array([0 in state for state in states]))
