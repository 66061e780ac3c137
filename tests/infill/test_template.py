"""Templates of text as tokens, and back."""

import pytest

from dllm_engine.demo import DEMO_MODEL_DIR
from dllm_engine.infill.template import (
    MOST_CANDIDATES,
    check_length,
    filled_in,
    parse_template,
    response_template,
    sized,
)


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


BAD = [(["text"], "no hole"), ([], "no hole"), ([True], r"template\[0\]=True is neither")]
BAD += [([0, "text"], r"template\[0\]=0: a hole has 1 or"), (["text", -3], r"template\[1\]=-3: a hole")]
BAD += [([1.5], r"template\[0\]=1.5 is neither")]
BAD += [([2, "a <|endoftext|>"], "template.1. contains the special token '<|endoftext|>'")]


@pytest.mark.parametrize(("pieces", "message"), BAD)
def test_bad_templates_are_refused(tokenizer, pieces, message):
    with pytest.raises(ValueError, match=message):
        response_template(pieces, tokenizer, 64)
    with pytest.raises(ValueError, match="no tokenizer"):
        response_template([1, "a"], None, 64)


class Untouched:
    """A tokenizer that nobody may use yet."""

    max_chars_per_token = 15


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (
            [1 << 20] * 30,
            "holes of 31457280 tokens and given texts of 0 characters .* at least 31457280, max_model_len",
        ),
        ([10**400], "max_model_len is 2048"),
        (
            [2, "a" * (15 * 2048)],
            "holes of 2 tokens and given texts of 30720 characters .* at least 2050, max_model_len",
        ),
        (["a", 1] * 1025, "template has 2050 entries, of which max_model_len=2048 allows 2048"),
    ],
)
def test_sizes_are_added_up_before_anything_is_made_of_them(pieces, message):
    with pytest.raises(ValueError, match=message):
        response_template(pieces, Untouched(), 2048)
    assert response_template([2048], Untouched(), 2048) == [None] * 2048


def test_the_length_of_response_template_is_checked_before_it_is_read():
    check_length("response_template", [None] * 8, 8)
    check_length("response_template", "[" + ", ".join(["126463"] * 8) + "]", 8)
    for given in ([None] * 9, "[" + "null," * 40):
        with pytest.raises(ValueError, match="response_template has"):
            check_length("response_template", given, 8)
