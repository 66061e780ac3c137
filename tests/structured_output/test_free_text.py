"""Automata of reasoning, against every way to spell a text."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.constraints.automaton import Automaton, joined
from dllm_engine.structured_output.compiler import Vocabulary, reasoning_automaton
from tests.support.automaton_walks import accepts
from tests.support.random_requests import random_automaton

PIECES = [
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"aab",
    b"bb",
    b"c",
    b"abca",
    "é".encode(),
    b"",
    b"",
    b"",
    b"",
]
END, START, SPECIAL, MASK = range(9, 13)
"""Tokens that spell no text."""
TOKENS = st.sampled_from([token for token in range(len(PIECES)) if token != START])
MARKERS = ["ab", "aab", "abab", "bab", "a", "abcab", "é"]


def automaton_of(
    marker: str, end_token: int | None, start_token: int | None
) -> Automaton:
    return reasoning_automaton(Vocabulary(PIECES), 100, marker, end_token, start_token)


@given(
    st.sampled_from(MARKERS), st.lists(TOKENS, max_size=7), st.booleans(), st.booleans()
)
@settings(max_examples=600)
def test_a_spelled_marker_ends_reasoning_where_it_first_appears(
    marker, tokens, has_start, begins_with_it
):
    automaton = automaton_of(marker, None, START if has_start else None)
    text = b"".join(PIECES[token] for token in tokens)
    ends = text.find(marker.encode()) == len(text) - len(marker.encode()) >= 0
    free = all(PIECES[token] for token in tokens) and (has_start or not begins_with_it)
    assert accepts(automaton, [START] * begins_with_it + tokens) == (free and ends)


@given(st.sampled_from(MARKERS), st.lists(TOKENS, max_size=7))
@settings(max_examples=600)
def test_a_marker_that_is_a_token_is_not_spelled_otherwise(marker, tokens):
    automaton = automaton_of(marker, END, None)
    text = b"".join(PIECES[token] for token in tokens)
    assert not accepts(automaton, tokens) or tokens[-1] == END
    free = all(PIECES[token] for token in tokens) and marker.encode() not in text
    assert accepts(automaton, [*tokens, END]) == free


@given(st.integers(0, 1 << 30), st.lists(st.integers(0, 12), max_size=6))
@settings(max_examples=400)
def test_joined_automata_accept_one_text_behind_the_other(seed, tokens):
    second = random_automaton(random.Random(seed), len(PIECES), {MASK})
    first = automaton_of("ab", None, START)
    together = joined(first, second)
    splits = [i for i in range(len(tokens) + 1) if accepts(first, tokens[:i])]
    assert len(splits) <= 1
    assert accepts(together, tokens) == any(accepts(second, tokens[i:]) for i in splits)
    assert together.class_of.dtype == together.next_state.dtype == np.int32
    assert (
        (together.class_of < 0) == ((first.class_of < 0) & (second.class_of < 0))
    ).all()


def test_tokens_that_cannot_spell_the_marker_are_an_error():
    with pytest.raises(ValueError, match="spell no text"):
        automaton_of("x", None, None)
