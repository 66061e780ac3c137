"""Constraints: which states can be completed, and the most probable way to do it,
against every sequence of tokens.
"""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.constraints.automaton import Automaton, any_text, unpacked
from dllm_engine.constraints.constraint import Constraint, constraint_of
from dllm_engine.model_executor.constraints.constrained_response import (
    ConstrainedResponse,
)
from tests.oracles.constrained import PlainConstraint
from tests.support.random_requests import random_automaton

VOCAB = 7
NEVER = 6


@given(st.integers(0, 1 << 30), st.integers(1, 5), st.integers(0, 4), st.booleans())
@settings(max_examples=300, deadline=None)
def test_reasoning_keeps_its_budget_and_is_bounded_by_nothing_else(
    seed, length, budget, is_free
):
    """Against every sequence of tokens. 0 and 1 together end reasoning, or also 3;
    other tokens from 3 are in none.
    """
    draw = random.Random(seed)
    long_marker = draw.random() < 0.5
    table = [
        [1, 0, 0, -1 if long_marker else 2],
        [1, 2, 0, -1 if long_marker else 2],
        [-1] * 4,
    ]
    reasoning = Automaton(
        np.array([0, 1, 2, 3, -1, -1, -1]),
        np.array(table),
        np.array([False, False, True]),
    )
    answer = None if is_free else random_automaton(draw, VOCAB, {NEVER})
    ends = frozenset(draw.choice([(), (5,)]))
    constraint = constraint_of(answer and answer.packed, ends, reasoning.packed)
    plain = PlainConstraint((answer or any_text(VOCAB)).packed, ends)

    may_reason = {0, 1, 2} if long_marker else {0, 1, 2, 3}

    def ended_reasoning(tokens):
        """The number of tokens up to the end of the reasoning, and the tokens behind
        it; None if it does not end.
        """
        state = 0
        for place, token in enumerate(tokens):
            state = reasoning.next_state[state, token] if token <= 3 else -1
            if state < 0:
                return None
            if state == 2:
                return place + 1, tokens[place + 1 :]
        return None

    def is_right(tokens):
        if is_free:
            count = next(
                (place for place, token in enumerate(tokens) if token in ends),
                len(tokens),
            )
            spoken, behind = tokens[:count], tokens[count:]
            is_closed = all(token in ends for token in behind)
            is_reasoning = {*spoken} <= may_reason and ended_reasoning(spoken) is None
            if is_closed and is_reasoning and count <= budget:
                return True
        split = ended_reasoning(tokens)
        return (
            split is not None
            and split[0] <= budget + 1 + long_marker
            and plain.accepts(split[1])
        )

    template = [draw.choice([None, None, draw.randrange(VOCAB)]) for _ in range(length)]
    choices = [range(VOCAB) if token is None else [token] for token in template]
    accepted = [tokens for tokens in itertools.product(*choices) if is_right(tokens)]
    assert constraint.completable(template, budget=budget)[0][0] == bool(accepted)
    if not accepted:
        return
    scores = np.array([[draw.gauss(0, 3) for _ in range(VOCAB)] for _ in range(length)])
    masks = [place for place, token in enumerate(template) if token is None]
    by_class = np.full((length, constraint.num_classes), -np.inf)
    for token, number in enumerate(constraint.class_of):
        if number >= 0:
            by_class[:, number] = np.maximum(by_class[:, number], scores[:, token])
    known = np.array([-1 if token is None else token for token in template])
    response = ConstrainedResponse(constraint, 0, template, thinking_budget=budget)
    classes = response.classes(
        known, length, np.array(masks, dtype=np.int64), by_class[masks]
    )
    best = max(
        sum(scores[place, tokens[place]] for place in masks) for tokens in accepted
    )
    assert sum(by_class[masks, classes]) == pytest.approx(best)


def word(*tokens: int, vocab_size: int = VOCAB) -> Automaton:
    """Accepts one sequence of tokens."""
    class_of = np.full(vocab_size, -1, np.int32)
    class_of[list(tokens)] = range(len(tokens))
    following = np.full((len(tokens) + 1, len(tokens)), -1, np.int32)
    for place in range(len(tokens)):
        following[place, place] = place + 1
    return Automaton(class_of, following, np.arange(len(tokens) + 1) == len(tokens))


def test_fewest_tokens():
    assert Constraint(word(3, 1, 4), frozenset()).fewest_tokens() == 3
    assert Constraint(word(), frozenset({2})).fewest_tokens() == 0
    # A token that ends the response spells nothing.
    assert Constraint(word(3, 1, 4), frozenset({1})).fewest_tokens() is None


def test_a_text_is_found_where_the_model_rules_out_every_token():
    response = ConstrainedResponse(Constraint(word(3, 1), frozenset()), 0, [None, None])
    for nothing in (-np.inf, np.nan):
        classes = response.classes(
            np.array([-1, -1]), 2, np.array([0, 1]), np.full((2, 3), nothing)
        )
        assert classes.tolist() == [0, 1]


def test_packed_automata_are_the_same_and_shared():
    automaton = word(3, 1)
    copy = unpacked(automaton.packed)
    for name in ("class_of", "next_state", "accepting"):
        np.testing.assert_array_equal(getattr(copy, name), getattr(automaton, name))
    assert copy is unpacked(word(3, 1).packed)
    assert constraint_of(automaton.packed, frozenset({5})) is constraint_of(
        word(3, 1).packed, frozenset({5})
    )
