import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.structured_output.python_regex import regex_expression
from tests.support.automaton_walks import (
    LETTERS,
    TOKENS,
    accepts,
    built,
    segmented,
    walk,
)

ATOMS = (
    "a b ab . \\d \\W \\s [abc] [^a] [a-c0-2] [\\w-] é (?i:k) (?s:.) [^\\x00-é]".split()
)
ATOMS += "你 \\n \\. (?a:\\w) [\\]^] (?i:[^S])".split()


def patterns() -> st.SearchStrategy[str]:
    def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.lists(inner, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map(
                lambda parts: f"({'|'.join(parts)})"
            ),
            st.tuples(
                inner,
                st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{,2}"]),
            ).map(lambda parts: f"(?:{parts[0]}){parts[1]}"),
            inner.map(lambda part: f"^{part}$"),
        )

    return st.recursive(st.sampled_from(ATOMS), grown, max_leaves=6).filter(_supported)


def _supported(pattern: str) -> bool:
    try:
        regex_expression(pattern)
    except ValueError as error:
        if "anchor" in str(error):
            return False
        raise
    return True


@settings(max_examples=25, deadline=None)
@given(patterns(), st.randoms(use_true_random=False))
def test_accepted_texts_match(pattern, choice):
    try:
        automaton = built("regex", pattern)
    except ValueError as error:
        if "no text" in str(error):
            return
        raise
    for _ in range(5):
        text = walk(automaton, TOKENS, choice, 12).decode()
        assert re.fullmatch(pattern, text), text


@settings(max_examples=25, deadline=None)
@given(patterns(), st.data(), st.randoms(use_true_random=False))
def test_matching_texts_are_accepted_however_they_are_spelled(pattern, data, choice):
    text = data.draw(
        st.from_regex(
            pattern, fullmatch=True, alphabet=st.characters(exclude_categories=["Cs"])
        )
    )
    if not re.fullmatch(
        pattern, text
    ):  # '^' and '$' are not held to by hypothesis in all places
        return
    automaton = built("regex", pattern)
    for _ in range(3):
        assert accepts(automaton, segmented(text.encode(), TOKENS, choice))


@settings(max_examples=25, deadline=None)
@given(patterns(), st.lists(st.sampled_from(range(len(TOKENS))), max_size=4))
def test_any_tokens_are_accepted_where_they_match(pattern, tokens):
    try:
        text = b"".join(TOKENS[token] for token in tokens).decode()
        automaton = built("regex", pattern)
    except ValueError:
        return
    assert accepts(automaton, tokens) == bool(
        (re.fullmatch(pattern, text) and not text.endswith("\n"))
        or re.fullmatch(pattern.replace("$", ""), text)
    )


@settings(max_examples=25, deadline=None)
@given(patterns(), st.sets(st.sampled_from([*LETTERS, b"1", b"\n"]), min_size=1))
def test_tokens_of_a_class_are_those_that_act_alike(pattern, vocabulary):
    try:
        automaton = built("regex", pattern, [b"", *sorted(vocabulary), b""])
    except ValueError:
        return
    assert automaton.class_of.dtype == automaton.next_state.dtype == np.int32
    columns = {tuple(column) for column in automaton.next_state.T.tolist()}
    assert len(columns) == automaton.next_state.shape[1]  # no two classes do the same
    assert (automaton.next_state >= 0).any(0).all()
    assert automaton.class_of[0] == automaton.class_of[-1] == -1
    assert set(automaton.class_of.tolist()) - {-1} == set(range(len(columns)))


@pytest.mark.parametrize("size", [1, 3])
def test_longest_tokens(size):
    tokens = [b"ab" * 50, b"a", b"b"]
    automaton = built("regex", f"(?:ab){{{50 * size}}}", tokens)
    assert accepts(automaton, [0] * size)
    assert not accepts(automaton, [0] * (size + 1))


REFUSED = {
    "(?=a)b": "look-around",
    "(?<!a)b": "look-around",
    r"(a)\1": "a back-reference",
    "(?>a*)a": "an atomic group",
    "(a)?(?(1)b|c)": "a condition on a group",
    "a++": "a possessive quantifier",
    r"\bword": r"\b or \B",
    "a{99999999999}": "not a regex",
    "a^b": "an anchor",
    "a$b": "an anchor",
    "(a": "missing ), unterminated subpattern",
    "[z-a]": "bad character range",
    r"\p{L}": r"bad escape \p",
    "(" * 3000 + ")" * 3000: "nested too deeply",
}


@pytest.mark.parametrize(("pattern", "named"), REFUSED.items())
def test_refused(pattern, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        regex_expression(pattern)


def test_more_states_than_the_limit():
    with pytest.raises(ValueError, match="max_automaton_states=50"):
        built("regex", "(a|b)*a(a|b){25}", max_states=50)
    with pytest.raises(ValueError, match="max_automaton_states=50"):
        built("regex", "a{51}", max_states=50)
    built("regex", "a{49}", max_states=50)


def test_no_text_can_be_spelled():
    with pytest.raises(ValueError, match="no text"):
        built("regex", "ab", [b"a", b"aa"])
    with pytest.raises(ValueError, match="no text"):
        built("regex", r"[^\s\S]")
