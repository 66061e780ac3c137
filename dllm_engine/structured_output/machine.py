"""Finite automata of expressions, over the bytes of UTF-8."""

from functools import cache

import numpy as np

from dllm_engine.scheduler.constraints.constraint import FAR, Automaton, distances
from dllm_engine.structured_output.expression import Chars, Either, Expression, Listed, Ranges, Repeated

_LEADS = ((0, 128, 0), (0xC0, 32, 0x80), (0xE0, 16, 0x800), (0xF0, 8, 0x10000))
"""Characters of one to four bytes: their lowest first byte, the number of first bytes, the first character."""


class TooManyStatesError(ValueError):
    """A limit on states is passed."""


def minimal(automaton: Automaton) -> Automaton:
    """The automaton of fewest states and classes that accepts the same; without states where it accepts nothing."""
    num_states = len(automaton.accepting)
    states, symbols = np.nonzero(automaton.next_state >= 0)
    edges = np.unique(states * num_states + automaton.next_state[states, symbols])
    sources, targets = np.divmod(edges, num_states)
    # States that are apart from the first spare a round for each character of the longest text.
    group = distances(targets, sources, automaton.accepting)
    kept = (group < FAR) & (distances(sources, targets, np.arange(num_states) == 0) < FAR)
    group = np.append(np.where(kept, group, -1), -1).astype(np.int32)
    num_groups = 0
    while True:
        rows = np.column_stack([group[:-1], group[automaton.next_state]])[kept]
        firsts, group[:-1][kept] = distinct_rows(rows)
        if len(firsts) == num_groups:
            break
        num_groups = len(firsts)
    firsts = np.flatnonzero(kept)[firsts]
    table = np.insert(group[automaton.next_state[firsts]], 0, -1, axis=1)  # first of all a class that leads nowhere
    columns, kinds = distinct_rows(table.T)
    class_of = (kinds[automaton.class_of + 1] - 1).astype(np.int32)
    return Automaton(class_of, np.ascontiguousarray(table[:, columns[1:]]), automaton.accepting[firsts])


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
        bytes(values) if size == 1 else (bytes(values), Either(_bytes(behind, 0x80, 64)))
        for behind, values in leads.items()
        if b"\1" in behind
    ]


class _Rests:
    """Rests of the texts of an expression, which are the states of an automaton that is not deterministic."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.rests: list[tuple[bytes | None, list[int]]] = [(None, [])]
        """The bytes of which a rest begins with one, None where it begins with none, and the numbers of the rests that
        may follow. Rest 0 is the end."""

    def new(self, following: list[int], first: bytes | None = None) -> int:
        if len(self.rests) >= self.most:
            raise TooManyStatesError
        self.rests.append((first, following))
        return len(self.rests) - 1

    def before(self, expression: Expression, behind: int) -> int:
        """The rest that is the expression and then the rest ``behind``."""
        match expression:
            case bytes():
                return self.new([behind], expression)
            case Chars(ranges):
                return self.before(_utf8(ranges), behind)
            case tuple():
                for part in reversed(expression):
                    behind = self.before(part, behind)
                return behind
            case Either(branches):
                return self.new([self.before(branch, behind) for branch in branches])
            case Repeated(item, least, most, separator):
                loop = self.new([behind])  # any number of items may follow it
                after, count = (loop, max(least, 1)) if most is None else (behind, most)
                for done in reversed(range(count)):
                    begun = self.before(item, after)
                    separated = self.before(separator, begun)
                    if after == loop:
                        self.rests[loop][1].append(separated)
                    after = self.new([separated if done else begun] + [behind] * (done >= least))
                return after
            case Listed(items, separator):
                first = after = behind
                for item, is_required in reversed(items):
                    begun = self.before(item, after)
                    separated = self.before(separator, begun)
                    first = begun if is_required else self.new([begun, first])
                    after = separated if is_required else self.new([separated, after])
                return first

    def closure(self, number: int) -> frozenset[int]:
        """The rests that begin with a byte, and the end, which a rest may be without a byte read."""
        seen, numbers = {number}, [number]
        for each in numbers:  # grows as it is read
            first, following = self.rests[each]
            fresh = [] if first else [rest for rest in following if rest not in seen]
            seen.update(fresh)
            numbers += fresh
        return frozenset(each for each in seen if not each or self.rests[each][0])


def byte_automaton(expression: Expression, most: int) -> Automaton:
    """The automaton over bytes, as 256 tokens. Raises ``TooManyStatesError`` where it has over ``most`` states."""
    rests = _Rests(8 * most)
    start = rests.before(expression, 0)
    sets = list(dict.fromkeys(first for first, _ in rests.rests if first))
    member = np.zeros((256, len(sets)), np.int32)
    for i, byte_set in enumerate(sets):
        member[list(byte_set), i] = 1
    firsts, kind_of = distinct_rows(member)
    kinds = {each: np.flatnonzero(column).tolist() for each, column in zip(sets, member[firsts].T, strict=True)}
    closure = cache(rests.closure)
    states = [closure(start)]
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
        for first, following in (rests.rests[number] for number in state):
            for kind in kinds[first] if first else ():
                begun[kind].update(following)
        table.append(np.array([state_of(frozenset(behind)) if behind else -1 for behind in begun], np.int32))
    return Automaton(kind_of, np.stack(table), np.array([0 in state for state in states]))
