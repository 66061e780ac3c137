"""Compilation of expressions into automata over the bytes of UTF-8, and of these into
automata over tokens. Automata of reasoning, which is free text up to the first marker.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

import numpy as np

from dllm_engine.constraints.automaton import FAR, Automaton, distances
from dllm_engine.structured_output.expression import (
    Chars,
    Either,
    Expression,
    Listed,
    Ranges,
    Repeated,
)

_LEADS = ((0, 128, 0), (0xC0, 32, 0x80), (0xE0, 16, 0x800), (0xF0, 8, 0x10000))
"""For characters of one to four bytes: the lowest first byte, the number of first
bytes, and the first character.
"""


class TooManyStatesError(ValueError):
    """A limit on the number of states is exceeded."""


def minimal(automaton: Automaton) -> Automaton:
    """The equivalent automaton with the fewest states and classes. It has no states if
    it accepts nothing.
    """
    num_states = len(automaton.accepting)
    states, symbols = np.nonzero(automaton.next_state >= 0)
    edges = np.unique(states * num_states + automaton.next_state[states, symbols])
    sources, targets = np.divmod(edges, num_states)
    # Start with groups by the distance to an accepting state: otherwise each character
    # of the longest text takes a round.
    group = distances(targets, sources, automaton.accepting)
    kept = (group < FAR) & (
        distances(sources, targets, np.arange(num_states) == 0) < FAR
    )
    group = np.append(np.where(kept, group, -1), -1).astype(np.int32)
    num_groups = 0
    while True:
        rows = np.column_stack([group[:-1], group[automaton.next_state]])[kept]
        firsts, group[:-1][kept] = distinct_rows(rows)
        if len(firsts) == num_groups:
            break
        num_groups = len(firsts)
    firsts = np.flatnonzero(kept)[firsts]
    # Column 0 is a class that leads nowhere.
    table = np.insert(group[automaton.next_state[firsts]], 0, -1, axis=1)
    columns, kinds = distinct_rows(table.T)
    class_of = (kinds[automaton.class_of + 1] - 1).astype(np.int32)
    return Automaton(
        class_of,
        np.ascontiguousarray(table[:, columns[1:]]),
        automaton.accepting[firsts],
    )


def distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each kind, in order, and the kind of each row."""
    multipliers = np.random.default_rng(0).integers(
        1 << 63, size=rows.shape[1], dtype=np.uint64
    )
    hashes = rows.astype(np.uint64) @ multipliers
    _, firsts, kinds = np.unique(hashes, return_index=True, return_inverse=True)
    if not np.array_equal(rows[firsts[kinds]], rows):  # two rows of one hash
        _, firsts, kinds = np.unique(
            rows, axis=0, return_index=True, return_inverse=True
        )
    order = np.argsort(firsts)
    return firsts[order], np.argsort(order)[kinds]


@cache
def _utf8(ranges: Ranges) -> Expression:
    """A character of a set, as bytes."""
    in_set = np.zeros(8 << 18, bool)
    for first, last in ranges:
        in_set[first : last + 1] = True
    in_set[0xD800:0xE000] = False  # UTF-8 has no surrogates
    branches: list[Expression] = []
    for tail, (lead, count, least) in enumerate(_LEADS):
        in_set[:least] = False  # they have a shorter form
        branches += _bytes(in_set[: count << (6 * tail)].tobytes(), lead, count)
    return branches[0] if len(branches) == 1 else Either(branches)


def _bytes(in_set: bytes, lead: int, count: int) -> list[Expression]:
    """Branches for the characters of a set. ``in_set``: membership of each character;
    the first byte of a character is one of ``count`` from ``lead`` on.
    """
    size = len(in_set) // count
    leads: dict[bytes, list[int]] = {}
    for i in range(count):
        leads.setdefault(in_set[i * size : (i + 1) * size], []).append(lead + i)
    return [
        bytes(values)
        if size == 1
        else (bytes(values), Either(_bytes(behind, 0x80, 64)))
        for behind, values in leads.items()
        if b"\1" in behind
    ]


class _Rests:
    """Rests of the texts of an expression: the states of a nondeterministic automaton."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rests: list[tuple[bytes | None, list[int]]] = [(None, [])]
        """For each rest, the set of bytes that it may begin with (None if it reads no
        byte), and the rests that may follow. Rest 0 is the end."""

    def new(self, following: list[int], first: bytes | None = None) -> int:
        if len(self.rests) >= self.limit:
            raise TooManyStatesError
        self.rests.append((first, following))
        return len(self.rests) - 1

    def before(self, expression: Expression, behind: int) -> int:
        """The rest that consists of the expression and then the rest ``behind``."""
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
            case Repeated(item, minimum, maximum, separator):
                loop = self.new([behind])  # loops back for any number of items
                if maximum is None:
                    after, count = loop, max(minimum, 1)
                else:
                    after, count = behind, maximum
                for done in reversed(range(count)):
                    begun = self.before(item, after)
                    separated = self.before(separator, begun)
                    if after == loop:
                        self.rests[loop][1].append(separated)
                    after = self.new(
                        [separated if done else begun] + [behind] * (done >= minimum)
                    )
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
        """The rests that begin with a byte, or are the end, and that can be reached
        without reading a byte.
        """
        seen = {number}
        numbers = [number]
        for number in numbers:  # the list grows in the loop
            first, following = self.rests[number]
            fresh = [] if first else [rest for rest in following if rest not in seen]
            seen.update(fresh)
            numbers += fresh
        return frozenset(rest for rest in seen if not rest or self.rests[rest][0])


def byte_automaton(expression: Expression, max_states: int) -> Automaton:
    """The automaton over the 256 bytes as tokens. Raises ``TooManyStatesError`` if it
    has more than ``max_states`` states.
    """
    rests = _Rests(8 * max_states)
    start = rests.before(expression, 0)
    sets = list(dict.fromkeys(first for first, _ in rests.rests if first))
    member = np.zeros((256, len(sets)), np.int32)
    for i, byte_set in enumerate(sets):
        member[list(byte_set), i] = 1
    firsts, kind_of = distinct_rows(member)
    kinds = {
        byte_set: np.flatnonzero(column).tolist()
        for byte_set, column in zip(sets, member[firsts].T, strict=True)
    }
    closure = cache(rests.closure)
    states = [closure(start)]
    numbers = {states[0]: 0}

    @cache
    def state_of(begun: frozenset[int]) -> int:
        state = frozenset().union(*map(closure, begun))
        if state not in numbers:
            if len(states) >= max_states:
                raise TooManyStatesError
            numbers[state] = len(states)
            states.append(state)
        return numbers[state]

    table = []
    for state in states:  # the list grows in the loop
        begun: list[set[int]] = [set() for _ in firsts]
        for first, following in (rests.rests[number] for number in state):
            for kind in kinds[first] if first else ():
                begun[kind].update(following)
        table.append(
            np.array(
                [state_of(frozenset(behind)) if behind else -1 for behind in begun],
                np.int32,
            )
        )
    return Automaton(
        kind_of, np.stack(table), np.array([0 in state for state in states])
    )


class Vocabulary:
    """The bytes of a tokenizer's tokens. Vocabularies with the same bytes are equal."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.token_bytes = np.frombuffer(b"".join(tokens), np.uint8)
        """uint8: the bytes of all tokens, end to end."""
        self.starts = np.cumsum([0, *map(len, tokens)])
        """int64 ``[vocab_size + 1]``: index of the first byte of each token. Special
        and added tokens, and unused ids, have no bytes."""
        self.digest = _digest(self.token_bytes) + _digest(self.starts)

    def spelling(self, token: int) -> bytes:
        return self.token_bytes[slice(*self.starts[token : token + 2])].tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def token_automaton(
    of_bytes: Automaton, vocabulary: Vocabulary, most_states: int
) -> Automaton:
    """The automaton over tokens. Tokens without bytes are in no text. Raises
    ``ValueError`` if the tokens can spell no text, and ``TooManyStatesError`` if there
    are more than ``most_states`` states."""
    automaton = minimal(
        _over_tokens(of_bytes, vocabulary.token_bytes, vocabulary.starts)
    )
    if not len(automaton.accepting):
        raise ValueError("the tokens of this model spell no text that matches")
    if len(automaton.accepting) > most_states:
        raise TooManyStatesError
    return automaton


def _over_tokens(
    of_bytes: Automaton, token_bytes: np.ndarray, starts: np.ndarray
) -> Automaton:
    """The automaton over tokens, with the same states.

    Reads byte i of all tokens at once. Tokens that have led to the same states so far
    are read as one.
    """
    by_kind = np.pad(of_bytes.next_state.T, ((0, 0), (0, 1)), constant_values=-1)
    states = np.arange(len(of_bytes.accepting), dtype=np.int32)
    columns = [np.full_like(states, -1), states]  # column 0 leads nowhere
    numbers = {_digest(column): number for number, column in enumerate(columns)}
    lengths = np.diff(starts)
    column_of = (lengths > 0).astype(np.int64)
    for i in range(int(lengths.max(initial=0))):
        tokens = np.flatnonzero((lengths > i) & (column_of > 0))
        kinds = of_bytes.class_of[token_bytes[starts[tokens] + i]]
        steps, step_of = np.unique(
            column_of[tokens] * len(by_kind) + kinds, return_inverse=True
        )
        for step_number, step in enumerate(steps.tolist()):
            before, kind = divmod(step, len(by_kind))
            column = by_kind[kind][columns[before]]
            steps[step_number] = number = numbers.setdefault(
                _digest(column), len(columns)
            )
            if number == len(columns):
                columns.append(column)
        column_of[tokens] = steps[step_of]
    used, class_of = np.unique(column_of, return_inverse=True)
    return Automaton(
        class_of,
        np.stack([columns[number] for number in used], axis=1),
        of_bytes.accepting,
    )


def _digest(column: np.ndarray) -> bytes:
    return blake2b(column.tobytes(), digest_size=16).digest()


def reasoning_automaton(
    vocabulary: Vocabulary,
    most_states: int,
    end: str,
    end_token: int | None,
    start_token: int | None,
    any_token: bool = False,
) -> Automaton:
    """Automaton of any text up to the marker ``end``, such as ``</think>``, with which
    the last token ends. ``end_token``: the token of this marker, if there is one; other
    tokens cannot spell it then. ``start_token``: a token that may begin reasoning.
    Errors as for ``token_automaton``.

    ``any_token``: any text may follow, so the last token may contain text after the
    marker, and reasoning may contain any token.
    """
    anything = Repeated(bytes(range(256)), 0, None)
    of_bytes = byte_automaton(
        (anything, *(bytes([byte]) for byte in end.encode())), most_states
    )
    # The first marker ends reasoning.
    of_bytes.next_state[of_bytes.accepting] = (
        np.flatnonzero(of_bytes.accepting)[0] if any_token else -1
    )
    free = token_automaton(of_bytes, vocabulary, most_states)
    class_of = free.class_of.copy()
    table = free.next_state
    ended = int(np.flatnonzero(free.accepting)[0])
    if end_token is not None:
        table = np.where(table == ended, -1, table)
    begins = np.where(np.arange(len(table)) == 0, 0, -1)
    ends = np.where(free.accepting, -1, ended)
    if any_token:
        class_of[class_of < 0] = table.shape[1]
        table = np.column_stack([table, np.where(free.accepting, -1, 0)])
    for token, column in ((start_token, begins), (end_token, ends)):
        if token is not None:
            class_of[token] = table.shape[1]
            table = np.column_stack([table, column])
    return Automaton(class_of, table.astype(np.int32), free.accepting)
