"""Words that a cursor has cut."""

import json
from typing import Any

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.infill.edges import (
    Openable,
    Opened,
    openings,
    vocabulary_of,
)
from dllm_engine.infill.template import Template
from tests.support.engines import assert_nothing_left
from tests.support.http_app import chunks_of

QUESTION = "User: Copy: Rome Tom Oslo Accra\nBot: Rome Tom"


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def opened_singly(openable: Openable) -> Opened:
    """With the edges of one token."""
    return openable.opened(openable.before[-1], openable.behind[-1])


@pytest.mark.parametrize(
    ("prefix", "suffix", "stops", "texts"),
    [
        ("a pri", "(x)", [], ("i", "")),
        ("a pri", "t(x)", [], ("i", "t")),
        ("return ", "- 1", [], (" ", "")),
        ("a (", ")", [], ("", "")),
        ("a pri\n", "\nb", [], ("", "")),
        ("a pri", "(x)", ["in"], ("", "")),
        ("a pri", "t(x)", ["nt"], ("i", "")),
        ("a pri", "t(x)", ["\n"], ("i", "t")),
        ("a pri", "t(x)", None, ("", "")),
        ("a" * 1, "t(x)", [], ("", "t")),
    ],
)
def test_parts_of_words_are_opened(demo, prefix, suffix, stops, texts):
    tokenizer = demo.get_tokenizer()
    prompt, given = tokens_of(tokenizer, prefix), tokens_of(tokenizer, suffix)
    template = Template((None, given))
    opened = opened_singly(openings(prompt, template, tokenizer, stops, in_chat=False))
    assert opened.texts == texts
    assert opened.prompt == (prompt[:-1] if texts[0] else prompt)
    assert opened.template.parts == (None, given[1:] if texts[1] else given)
    names = vocabulary_of(tokenizer).names
    if texts[0]:
        before = opened.before
        assert {names[i][:1] for i in before.tokens} == {before.name}
    in_template = Template((prompt, None, given))
    chat = opened_singly(openings([5], in_template, tokenizer, stops, in_chat=True))
    assert chat.texts == texts
    assert chat.prompt == [5]


def test_a_hole_of_one_token_begins_and_ends_as_both_say(demo):
    tokenizer = demo.get_tokenizer()
    prompt, given = tokens_of(tokenizer, "(r"), tokens_of(tokenizer, "in t")
    template = Template((None, given))
    opened = opened_singly(openings(prompt, template, tokenizer, [], in_chat=False))
    names = {tokenizer.decode([token]) for token in opened.both}
    assert "rin" in names
    assert all(len(x) > 1 and x[0] == "r" and x[-2:] == "in" for x in names)
    assert opened.sizes(9, 0, 4, 32) == range(1, 7)


@pytest.mark.parametrize(
    ("before", "behind", "wanted"),
    [
        (" O", " Accra", "slo"),
        (" Os", " Accra", "lo"),
        ("", " Accra", " Oslo"),
        ("", "lo Accra", " Os"),
        (" O", "o Accra", "sl"),
    ],
)
def test_cut_words_are_completed(demo, client, before, behind, wanted):
    (output,) = demo.infill(QUESTION + before, behind)
    (completion,) = output.outputs
    assert (completion.text, completion.holes) == (wanted, [wanted])
    assert completion.joined == wanted + behind
    body = {"model": "demo", "prompt": QUESTION + before, "suffix": behind}
    answer = client.post("/v1/completions", json=body).json()["choices"][0]
    assert (answer["text"], answer["holes"]) == (wanted, [wanted])
    chunks = chunks_of(client.post("/v1/completions", json={**body, "stream": True}))
    parts = [x["text"] for chunk in chunks for x in chunk["choices"]]
    assert "".join(parts) == wanted
    marked = f"<fim_prefix>{QUESTION}{before}<fim_suffix>{behind}<fim_middle>"
    answer = client.post("/v1/completions", json={"model": "demo", "prompt": marked})
    assert answer.json()["choices"][0]["text"] == wanted
    fields = {"input_prefix": QUESTION + before, "input_suffix": behind}
    assert client.post("/infill", json=fields).json()["content"] == wanted
    fields = {"prompt": QUESTION + before, "suffix": behind}
    answer = client.post("/v1/fim/completions", json=fields).json()["choices"][0]
    assert answer["text"] == wanted
    assert_nothing_left(demo)


def test_a_given_length_opens_nothing(demo):
    (output,) = demo.infill(QUESTION + " Os", " Accra", DiffusionParams(gen_length=2))
    assert len(output.outputs[0].token_ids) == 2
    assert output.prompt == QUESTION + " Os"


def test_only_the_first_hole_may_end_with_the_begin_of_what_is_behind_it(demo):
    tokenizer = demo.get_tokenizer()
    template = Template((None, tokens_of(tokenizer, ", Max=31")))
    prompt = tokens_of(tokenizer, "a (")
    opened = opened_singly(openings(prompt, template, tokenizer, [], in_chat=False))
    barred = []
    for rank in (0, 1):
        params = DiffusionParams().to_sampling_params()
        opened.put(params, opened.template.filled([3]), rank=rank)
        carried = json.loads((params.extra_args or {})["hole_edges"])
        barred.append(dict(carried["barred"]))
    assert barred[0] == {}
    names = {tokenizer.decode([token]) for token in barred[1][2]}
    assert names.issuperset((",", "=", "3", " Max"))
    assert names.isdisjoint(("(", "Tom"))


def test_no_other_response_repeats_what_is_behind_the_hole(demo, client):
    prefix = "User: Tom=48. Ida=07. Max=31. Give: Tom, Ida, Max\nBot:"
    suffix = ", Max=31"
    body = {"model": "demo", "prompt": f"{prefix} Tom=48,", "suffix": suffix, "n": 5}
    answer = client.post("/v1/completions", json=body).json()
    first, *others = [choice["text"] for choice in answer["choices"]]
    assert first == " Ida=07"
    for text in others:
        assert not any(text.endswith(suffix[:size]) for size in range(1, 9))
