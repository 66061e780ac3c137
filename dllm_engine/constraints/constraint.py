"""Constraints of a response: an automaton, and end tokens that close its text."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from dllm_engine.constraints.automaton import (
    FAR,
    Automaton,
    any_text,
    distances,
    joined,
    unpacked,
)


class Transitions:
    """Pairs of states with tokens that lead from the first to the second. Pairs with
    the same classes of tokens share one set of classes."""

    def __init__(self, next_state: np.ndarray) -> None:
        """``next_state``: int32 ``[num_states, num_classes]``, −1 if a class leads
        nowhere.
        """
        num_states, num_classes = next_state.shape
        sources, classes = np.nonzero(next_state >= 0)
        keys = next_state[sources, classes].astype(np.int64) * num_states + sources
        pairs, pair_of = np.unique(keys, return_inverse=True)
        self.targets, self.sources = np.divmod(pairs, num_states)
        """``[num_pairs]`` each: the second state, ascending, and the first."""
        self.reached, self.into = np.unique(self.targets, return_index=True)
        """States that occur as second state, and the first pair of each."""
        # Sets with equal sums are equal: a chance collision among 2**63 numbers is
        # practically impossible.
        numbers = np.random.default_rng(0).integers(
            1 << 63, size=(num_classes,), dtype=np.uint64
        )
        sums = np.zeros(len(pairs), np.uint64)
        np.add.at(sums, pair_of, numbers[classes])
        _, firsts, self.set_of = np.unique(sums, return_index=True, return_inverse=True)
        """``[num_pairs]``: index of the set of classes."""
        self.num_sets = len(firsts)
        is_first = np.isin(pair_of, firsts)
        self.classes = classes[is_first]
        self.sets = self.set_of[pair_of[is_first]]
        """Classes of all sets, end to end, and the set of each."""


class Leeway(NamedTuple):
    """Freedom of reasoning at a place of a response."""

    go_on: bool = True
    """True if reasoning may go on."""
    close: bool = True
    """True if the response may end within reasoning."""


class Constraint:
    """Automaton whose text is closed by an end token. Only end tokens follow an end
    token.

    End tokens are an additional class, and the closed text is an additional state.
    """

    def __init__(
        self, automaton: Automaton, end_tokens: frozenset[int], num_reasoning: int = 0
    ) -> None:
        """``num_reasoning``: number of states of reasoning, which come first. The next
        state is the first one after reasoning.
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
        # Drop classes whose only tokens were end tokens.
        used = (
            np.bincount(self.class_of[self.class_of >= 0], minlength=num_classes + 1)
            > 0
        )
        self.next_state[:, ~used] = -1
        self.num_states, self.num_classes = self.next_state.shape
        self.transitions = Transitions(self.next_state)
        self._before_mask = lru_cache(maxsize=1024)(self._states_before_mask)

    @cached_property
    def marker_length(self) -> int:
        """Fewest tokens that end reasoning."""
        sources = self.transitions.sources
        targets = self.transitions.targets
        return int(
            distances(sources, targets, np.arange(self.num_states) == 0)[
                self.num_reasoning
            ]
        )

    def leeway(self, place: int, budget: int | None) -> Leeway:
        """Leeway at each place of a response, from 0. ``budget``: the most tokens of
        reasoning; the marker that ends it follows at once. None: no limit.
        """
        if budget is None:
            return Leeway()
        return Leeway(
            go_on=place + 1 < budget + self.marker_length, close=place <= budget
        )

    def within(
        self, leeway: Leeway, sources: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        """Return which steps from ``sources`` to ``targets`` are within a leeway, bool
        ``[num_steps]``.
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
        """For each position of a response, and the position behind it: the states from
        which an accepted text can still be reached, with the given tokens and any
        tokens for the masks from there on; bool ``[num_states]``.

        ``template``: the response, with None for each mask. Masks before ``first_end``
        do not become end tokens. ``budget``: as in ``leeway``.
        """
        numbers = np.arange(self.num_states)
        # With such a budget, reasoning up to the end is too long.
        is_cut = budget is not None and budget < len(template)
        states = [
            self.accepting & (numbers >= self.num_reasoning)
            if is_cut
            else self.accepting
        ]
        for place in reversed(range(len(template))):
            token = template[place]
            accepted = states[-1]
            leeway = self.leeway(place, budget)
            if token is None:
                states.append(
                    self._before_mask(accepted.tobytes(), place >= first_end, leeway)
                )
            else:
                kind = self.class_of[token]
                following = self.next_state[:, kind]
                within = self.within(leeway, numbers, following)
                states.append(
                    (kind >= 0) & (following >= 0) & accepted[following] & within
                )
        return states[::-1]

    def _states_before_mask(
        self, accepted: bytes, may_end: bool, leeway: Leeway
    ) -> np.ndarray:
        """States from which a token leads to one of ``accepted`` (the bytes of bool
        ``[num_states]``). Without ``may_end``, end tokens do not count.
        """
        sources = self.transitions.sources
        targets = self.transitions.targets
        # Only end tokens lead to the last state.
        leads = np.frombuffer(accepted, bool)[targets] & (
            may_end | (targets < self.num_states - 1)
        )
        leads &= self.within(leeway, sources, targets)
        before = np.zeros(self.num_states, bool)
        before[sources[leads]] = True
        return before

    def fewest_tokens(self) -> int | None:
        """Fewest tokens of an accepted text, without end tokens; None: no text is
        accepted.
        """
        fewest = int(
            distances(
                self.transitions.targets, self.transitions.sources, self.accepting
            )[0]
        )
        return None if fewest == FAR else fewest

    @property
    def search_size(self) -> int:
        """Cost of a search for the most probable text per position: number of pairs of
        states, and of classes in sets.
        """
        return len(self.transitions.sources) + len(self.transitions.classes)


@lru_cache(maxsize=16)
def constraint_of(
    packed: bytes | None, end_tokens: frozenset[int], reasoning: bytes | None = None
) -> Constraint:
    """The constraint of ``Automaton.packed``, and of the reasoning before its text if
    there is any; cached for requests with equal ones. None: any text follows the
    reasoning, and the response may end within the reasoning."""
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
