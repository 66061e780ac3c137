"""Constraints: which states can be completed, and the most probable way to do it, against every sequence of tokens."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.scheduler.constraints.constraint import (
    Automaton,
    ConstrainedResponse,
    Constraint,
    constraint_of,
    unpacked,
)
from tests.oracles.constrained import PlainConstraint
from tests.support.random_requests import random_automaton

VOCAB = 7
NEVER = 6


def random_case(seed: int, length: int) -> tuple[Constraint, PlainConstraint, random.Random, list[int | None]]:
    draw = random.Random(seed)
    automaton = random_automaton(draw, VOCAB, {NEVER})
    ends = draw.choice([(), (5,), (4, 5)])
    template = [draw.choice([None, None, draw.randrange(VOCAB)]) for _ in range(length)]
    return Constraint(automaton, frozenset(ends)), PlainConstraint(automaton.packed, ends), draw, template


def texts(plain: PlainConstraint, template: list[int | None]) -> list[tuple[int, ...]]:
    """Every way to fill in the masks that is accepted."""
    choices = [range(VOCAB) if token is None else [token] for token in template]
    return [tokens for tokens in itertools.product(*choices) if plain.accepts(tokens)]


@given(st.integers(0, 1 << 30), st.integers(1, 4))
@settings(max_examples=300)
def test_the_most_probable_text_is_that_of_all_texts(seed, length):
    constraint, plain, draw, template = random_case(seed, length)
    accepted = texts(plain, template)
    assert constraint.completable(template)[0][0] == bool(accepted)
    if not accepted:
        return
    scores = np.array([[draw.gauss(0, 3) for _ in range(VOCAB)] for _ in range(length)])
    prompt = [0, 1]
    known = np.array([*prompt, *(-1 if token is None else token for token in template)])
    predicted = [i for i, token in enumerate(template) if token is None and draw.random() < 0.8]

    def total(tokens):
        return sum(scores[i, tokens[i]] for i in predicted)

    by_class = np.full((length, constraint.num_classes), -np.inf)
    for token, number in enumerate(constraint.class_of):
        if number >= 0:
            by_class[:, number] = np.maximum(by_class[:, number], scores[:, token])
    response = ConstrainedResponse(constraint, len(prompt), template)
    positions = np.array(predicted, dtype=np.int64) + len(prompt)
    classes = response.classes(known, len(known), positions, by_class[predicted])
    assert sum(by_class[predicted, classes]) == pytest.approx(max(map(total, accepted)))


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
        classes = response.classes(np.array([-1, -1]), 2, np.array([0, 1]), np.full((2, 3), nothing))
        assert classes.tolist() == [0, 1]


def test_packed_automata_are_the_same_and_shared():
    automaton = word(3, 1)
    copy = unpacked(automaton.packed)
    for name in ("class_of", "next_state", "accepting"):
        np.testing.assert_array_equal(getattr(copy, name), getattr(automaton, name))
    assert copy is unpacked(word(3, 1).packed)
    assert constraint_of(automaton.packed, frozenset({5})) is constraint_of(word(3, 1).packed, frozenset({5}))
