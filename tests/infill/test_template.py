"""Templates of text as tokens, and back."""

import pytest

from dllm_engine.demo import DEMO_MODEL_DIR
from dllm_engine.infill.template import MOST_CANDIDATES, filled_in, parse_template, response_template, sized


@pytest.fixture(scope="module")
def tokenizer():
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(DEMO_MODEL_DIR)


def test_marks_in_a_text_are_holes():
    assert parse_template("[[3]], Max=31. [[12]]") == [3, ", Max=31. ", 12]
    assert parse_template("[3] [[x]]") == ["[3] [[x]]"]


def test_holes_of_several_sizes_are_combined():
    assert sized([(1, 2), "a", 3]) == [[1, "a", 3], [2, "a", 3]]
    assert len(sized([(1, 2), (3, 4, 5)])) == 6
    with pytest.raises(ValueError, match=f"more than {MOST_CANDIDATES}"):
        sized([tuple(range(1, 10**6))] * 3)
    with pytest.raises(ValueError, match="no size"):
        sized([(), "a"])


def test_texts_become_tokens_and_filled_tokens_texts(tokenizer):
    given = tokenizer.encode(", Max=31", add_special_tokens=False)
    template = response_template([2, ", Max=31", 1], tokenizer, 64)
    assert template == [None, None, *given, None]
    filled = tokenizer.encode("17", add_special_tokens=False) + tokenizer.encode("5", add_special_tokens=False)
    assert filled_in(filled, template, tokenizer, with_given=False) == ["17", "5"]
    whole = [*filled[:2], *given, *filled[2:]]
    assert filled_in(whole, template, tokenizer, with_given=True) == ["17", "5"]
    # An end token has ended the response in its first hole.
    assert filled_in(whole[:1], template, tokenizer, with_given=True) == ["1", ""]
    with pytest.raises(ValueError, match="no tokenizer"):
        response_template([1, "a"], None, 64)
    with pytest.raises(ValueError, match=r"template\[0\]=True is neither"):
        response_template([True], tokenizer, 64)
