"""Constraints of a response: automata over tokens, and the most probable text that one
accepts.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

FAR = int(np.iinfo(np.int64).max)
_LEAST = -1e9
"""Score of a token that is ruled out: the text must be accepted all the same. Less than
any other, and no so much less that the sum of a text's scores would not tell them
apart."""


@dataclass(frozen=True, eq=False)
class Automaton:
    """Reads a text token by token, from state 0. Tokens that lead to the same state
    from every state are one class, so a few hundred classes stand for a vocabulary of
    126,464."""

    class_of: np.ndarray
    """int32 ``[vocab_size]``: the class of each token; −1 for a token that is in no
    accepted text.
    """
    next_state: np.ndarray
    """int32 ``[num_states, num_classes]``: where a class leads; −1 where no accepted
    text begins that way.
    """
    accepting: np.ndarray
    """bool ``[num_states]``: whether the text may end here."""

    @cached_property
    def packed(self) -> bytes:
        """To be sent; ``unpacked`` makes it an automaton again. Equal for equal
        automata.
        """
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            class_of=self.class_of,
            next_state=self.next_state,
            accepting=self.accepting,
            allow_pickle=False,
        )
        return buffer.getvalue()


def joined(first: Automaton, second: Automaton) -> Automaton:
    """Accepts a text of ``first`` with one of ``second`` behind it. No accepted text of
    ``first`` goes on.
    """
    tables = [
        np.pad(part.next_state, ((0, 0), (0, 1)), constant_values=-1)
        for part in (first, second)
    ]
    num_kinds = tables[1].shape[1]
    pair_of = (first.class_of + 1) * num_kinds + second.class_of + 1
    used = np.bincount(pair_of, minlength=tables[0].shape[1] * num_kinds) > 0
    used[0] = False  # tokens of neither
    kinds, second_kinds = np.divmod(np.flatnonzero(used), num_kinds)
    before = ~first.accepting
    num_before = int(before.sum())
    names = np.append(np.where(before, np.cumsum(before) - 1, num_before), -1)
    led, second_led = (
        names[tables[0][before][:, kinds - 1]],
        tables[1][:, second_kinds - 1],
    )
    return Automaton(
        np.where(used, np.cumsum(used) - 1, -1)[pair_of].astype(np.int32),
        np.concatenate(
            [led, np.where(second_led < 0, -1, second_led + num_before)]
        ).astype(np.int32),
        np.append(np.zeros(num_before, bool), second.accepting),
    )


def any_text(vocab_size: int) -> Automaton:
    """Accepts every text."""
    return Automaton(
        np.zeros(vocab_size, np.int32), np.zeros((1, 1), np.int32), np.ones(1, bool)
    )


def distances(
    sources: np.ndarray, targets: np.ndarray, begins: np.ndarray
) -> np.ndarray:
    """Fewest edges from a state of ``begins`` (bool ``[num_states]``) to each state,
    int64; ``FAR`` where none lead.

    Edge i leads from ``sources[i]`` to ``targets[i]``; each is followed once.
    """
    order = np.argsort(sources, kind="stable")
    targets, bounds = (
        targets[order],
        np.searchsorted(sources[order], np.arange(len(begins) + 1)),
    )
    distance = np.where(begins, 0, FAR)
    count, latest = 0, np.flatnonzero(begins)
    while latest.size:
        count += 1
        sizes = bounds[latest + 1] - bounds[latest]
        edges = np.arange(sizes.sum()) + np.repeat(
            bounds[latest] - np.cumsum(sizes) + sizes, sizes
        )
        latest = np.unique(targets[edges])
        latest = latest[distance[latest] > count]
        distance[latest] = count
    return distance


@lru_cache(maxsize=16)
def unpacked(packed: bytes) -> Automaton:
    """The automaton of ``Automaton.packed``. Requests of the same
    constraint share it.
    """
    with np.load(io.BytesIO(packed), allow_pickle=False) as tables:
        automaton = Automaton(**tables)
    vars(automaton)["packed"] = packed  # not to be made again
    return automaton


class Transitions:
    """Pairs of states of which tokens lead from the first to the second. Where the same
    classes do so, pairs share one set of classes."""

    def __init__(self, next_state: np.ndarray) -> None:
        """``next_state``: int32 ``[num_states, num_classes]``, −1 where a class leads
        nowhere.
        """
        num_states, num_classes = next_state.shape
        sources, classes = np.nonzero(next_state >= 0)
        keys = next_state[sources, classes].astype(np.int64) * num_states + sources
        pairs, pair_of = np.unique(keys, return_inverse=True)
        self.targets, self.sources = np.divmod(pairs, num_states)
        """``[num_pairs]`` each: the second state, ascending, and the first."""
        self.reached, self.into = np.unique(self.targets, return_index=True)
        """States that are some second state, and where the pairs of each
        of them begin.
        """
        # Sets of equal sums are equal: of 2**63 numbers no two sums of some are by
        # chance.
        numbers = np.random.default_rng(0).integers(
            1 << 63, size=(num_classes,), dtype=np.uint64
        )
        sums = np.zeros(len(pairs), np.uint64)
        np.add.at(sums, pair_of, numbers[classes])
        _, firsts, self.set_of = np.unique(sums, return_index=True, return_inverse=True)
        """``[num_pairs]``: the set of classes."""
        self.num_sets = len(firsts)
        is_first = np.isin(pair_of, firsts)
        self.classes, self.sets = classes[is_first], self.set_of[pair_of[is_first]]
        """Classes of all sets, and the set of each."""


class Leeway(NamedTuple):
    """What reasoning may do at one place of a response."""

    go_on: bool = True
    """It need not have ended."""
    close: bool = True
    """The response may end within it."""


class Constraint:
    """An automaton of which an end token closes the text. Only end tokens follow one.

    The end tokens are one more class, and the closed text is one more state.
    """

    def __init__(
        self, automaton: Automaton, end_tokens: frozenset[int], num_reasoning: int = 0
    ) -> None:
        """``num_reasoning``: number of states of reasoning, which come first. The next
        state is the one behind it.
        """
        self.num_reasoning = num_reasoning
        num_states, num_classes = automaton.next_state.shape
        self.class_of = automaton.class_of.copy()
        self.next_state = np.pad(
            automaton.next_state, ((0, 1), (0, 1)), constant_values=-1
        )
        self.accepting = np.append(automaton.accepting, True)
        """Accepting states, as in ``Automaton``."""
        self.class_of[sorted(end_tokens)] = num_classes
        self.next_state[self.accepting, -1] = num_states
        # An end token may have been the only one of a class.
        used = (
            np.bincount(self.class_of[self.class_of >= 0], minlength=num_classes + 1)
            > 0
        )
        self.next_state[:, ~used] = -1
        self.num_states, self.num_classes = self.next_state.shape
        self._transitions = Transitions(self.next_state)
        self._before_mask = lru_cache(maxsize=1024)(self._states_before_mask)

    @cached_property
    def marker_length(self) -> int:
        """Fewest tokens that end reasoning."""
        sources, targets = self._transitions.sources, self._transitions.targets
        return int(
            distances(sources, targets, np.arange(self.num_states) == 0)[
                self.num_reasoning
            ]
        )

    def leeway(self, place: int, budget: int | None) -> Leeway:
        """``budget``: the most tokens of reasoning, counted from the first place of the
        response, 0. The marker that ends it follows at once; None: no limit."""
        if budget is None:
            return Leeway()
        return Leeway(
            go_on=place + 1 < budget + self.marker_length, close=place <= budget
        )

    def _within(
        self, leeway: Leeway, sources: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        """Whether each step from one of ``sources`` to one of ``targets`` is within a
        leeway.
        """
        within = np.ones(len(targets), bool)
        if not leeway.go_on:
            within &= targets >= self.num_reasoning
        if not leeway.close:
            within &= (sources >= self.num_reasoning) | (targets < self.num_states - 1)
        return within

    def completable(
        self,
        template: Sequence[int | None],
        first_end: int = 0,
        budget: int | None = None,
    ) -> list[np.ndarray]:
        """For each position of a response and the one behind it, bool ``[num_states]``:
        from which states what is given there and behind, and some tokens for its masks,
        lead to an accepted text.

        ``template``: the response, with None for each mask; of those before
        ``first_end`` none is an end token. ``budget``: as in ``leeway``.
        """
        numbers = np.arange(self.num_states)
        is_cut = budget is not None and budget < len(
            template
        )  # reasoning that goes on to the end is too long
        states = [
            self.accepting & (numbers >= self.num_reasoning)
            if is_cut
            else self.accepting
        ]
        for place in reversed(range(len(template))):
            token, accepted = template[place], states[-1]
            leeway = self.leeway(place, budget)
            if token is None:
                states.append(
                    self._before_mask(accepted.tobytes(), place >= first_end, leeway)
                )
            else:
                kind = self.class_of[token]
                following = self.next_state[:, kind]
                within = self._within(leeway, numbers, following)
                states.append(
                    (kind >= 0) & (following >= 0) & accepted[following] & within
                )
        return states[::-1]

    def _states_before_mask(
        self, accepted: bytes, may_end: bool, leeway: Leeway
    ) -> np.ndarray:
        """The states from which a token leads to one of ``accepted``, which are the
        bytes of bool ``[num_states]``; not ``may_end``: a token that is no end token.
        """
        sources, targets = self._transitions.sources, self._transitions.targets
        # Only end tokens lead to the last state.
        leads = np.frombuffer(accepted, bool)[targets] & (
            may_end | (targets < self.num_states - 1)
        )
        leads &= self._within(leeway, sources, targets)
        before = np.zeros(self.num_states, bool)
        before[sources[leads]] = True
        return before

    def fewest_tokens(self) -> int | None:
        """Fewest tokens of an accepted text, without an end token; None: no text is
        accepted.
        """
        fewest = int(
            distances(
                self._transitions.targets, self._transitions.sources, self.accepting
            )[0]
        )
        return None if fewest == FAR else fewest

    @property
    def search_size(self) -> int:
        """Numbers that ``most_probable`` reads at each position: pairs of states, and
        classes of sets.
        """
        return len(self._transitions.sources) + len(self._transitions.classes)

    def after(self, state: int, tokens: Sequence[int]) -> int:
        """The state after ``tokens``; −1 where they lead nowhere."""
        for token in tokens:
            kind = int(self.class_of[token])
            state = (
                int(self.next_state[state, kind]) if state >= 0 and kind >= 0 else -1
            )
        return state

    def most_probable(
        self,
        state: int,
        scores: np.ndarray,
        accepted: np.ndarray,
        place: int = 0,
        budget: int | None = None,
    ) -> np.ndarray:
        """The classes of a run of tokens from ``state`` to one of ``accepted`` (bool
        ``[num_states]``) with the largest sum of scores, int64 ``[num_tokens]``; of
        equal ones any, but always the same.

        ``scores``: float64 ``[num_tokens, num_classes]``, −∞ for what must not be
        taken; some run has finite ones. ``place``: that of the first of the tokens in
        the response. ``budget``: as in ``leeway``.
        """
        t = self._transitions
        outside = {
            leeway: ~self._within(leeway, t.sources, t.targets)
            for leeway in {
                self.leeway(place + position, budget) for position in range(len(scores))
            }
        }
        best = np.full((len(scores) + 1, self.num_states), -np.inf)
        best[0, state] = 0.0
        set_scores = np.full((len(scores), t.num_sets), -np.inf)
        for position, class_scores in enumerate(scores):
            np.maximum.at(set_scores[position], t.sets, class_scores[t.classes])
            arriving = best[position, t.sources] + set_scores[position, t.set_of]
            arriving[outside[self.leeway(place + position, budget)]] = -np.inf
            best[position + 1, t.reached] = np.maximum.reduceat(arriving, t.into)
        path = np.empty(len(scores), dtype=np.int64)
        at = int(np.where(accepted, best[-1], -np.inf).argmax())
        for position in range(len(scores) - 1, -1, -1):
            into = np.flatnonzero(
                (t.targets == at) & ~outside[self.leeway(place + position, budget)]
            )
            step = into[
                (
                    best[position, t.sources[into]]
                    + set_scores[position, t.set_of[into]]
                ).argmax()
            ]
            classes = t.classes[t.sets == t.set_of[step]]
            path[position], at = (
                classes[scores[position, classes].argmax()],
                int(t.sources[step]),
            )
        return path


@lru_cache(maxsize=16)
def constraint_of(
    packed: bytes | None, end_tokens: frozenset[int], reasoning: bytes | None = None
) -> Constraint:
    """The constraint of ``Automaton.packed``, and of the reasoning before its text, if
    there is any. Requests of equal ones share it. None: any text follows the reasoning,
    and the response may end within that."""
    if reasoning is None:
        assert packed is not None
        return Constraint(unpacked(packed), end_tokens)
    before = unpacked(reasoning)
    num_reasoning = int((~before.accepting).sum())
    if packed is not None:
        return Constraint(joined(before, unpacked(packed)), end_tokens, num_reasoning)
    free = joined(before, any_text(len(before.class_of)))
    return Constraint(
        replace(free, accepting=np.ones_like(free.accepting)), end_tokens, num_reasoning
    )


class ConstrainedResponse:
    """Progress of one response's decided tokens in its constraint."""

    def __init__(
        self,
        constraint: Constraint,
        prompt_length: int,
        template: Sequence[int | None],
        first_end: int = 0,
        thinking_budget: int | None = None,
    ) -> None:
        """``template``: the response before its first step, with None for each mask.
        What the canvas has behind it may be anything. ``first_end``: the canvas
        position before which no mask becomes an end token."""
        self.constraint = constraint
        self._budget = thinking_budget
        self._start, self._stop = prompt_length, prompt_length + len(template)
        self._first_end = max(first_end, prompt_length)
        self._completable = constraint.completable(
            template, self._first_end - prompt_length, thinking_budget
        )
        self._position, self._state = prompt_length, 0

    def classes(
        self, known: np.ndarray, stop: int, positions: np.ndarray, scores: np.ndarray
    ) -> np.ndarray:
        """The class of each predicted position on the most probable way to complete the
        response, int64 ``[num_predicted]``.

        What is decided up to ``stop`` and not predicted is kept. Masks without a
        prediction may be anything. What is predicted behind ``stop`` is left out; its
        class is −1.

        Args:
            known: ``[canvas_length]``, the canvas's tokens, −1 where masked.
            stop: end of the running blocks. Behind it only what the template gives is
            decided.
            positions: canvas positions that are predicted, ascending but for repeated
            ones.
            scores: ``[num_predicted, num_classes]``, of the best token of each class.
        """
        stop = min(stop, self._stop)
        masked = np.flatnonzero(known[self._position : stop] < 0)
        first = self._position + int(masked[0]) if masked.size else stop
        first = min([first, *positions[:1].tolist()])
        self._state = self.constraint.after(
            self._state, known[self._position : first].tolist()
        )
        self._position = first
        table = np.zeros((stop - first, self.constraint.num_classes))
        inside = positions < stop
        table[positions[inside] - first] = np.nan_to_num(
            scores[inside], nan=_LEAST, posinf=-_LEAST, neginf=_LEAST
        )
        table[: max(self._first_end - first, 0), -1] = -np.inf
        decided = np.setdiff1d(
            np.flatnonzero(known[first:stop] >= 0), positions - first
        )
        table[decided] = -np.inf
        table[decided, self.constraint.class_of[known[first:stop][decided]]] = 0.0
        accepted = self._completable[stop - self._start]
        path = self.constraint.most_probable(
            self._state, table, accepted, first - self._start, self._budget
        )
        found = np.full(len(positions), -1)
        found[inside] = path[positions[inside] - first]
        return found
