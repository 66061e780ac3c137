"""Templates, and filling in with the demo model, in Python and over HTTP."""

import re
from typing import Any

import pytest
from vllm import SamplingParams

from dllm_engine import DiffusionParams
from dllm_engine.infill.template import (
    filled_in,
    parse_template,
    tokenized,
)
from tests.support.engines import assert_nothing_left
from tests.support.http_app import answered_meanwhile, chunks_of, length_of, refusal

PROMPT = "User: Tom=48. Ida=07. Max=31. Give: Tom, Ida, Max\nBot:"
CHAT = [{"role": "user", "content": PROMPT[6:-5]}]
BEFORE, WANTED, AFTER = " Tom=48,", " Ida=07", ", Max=31"


@pytest.fixture
def complete(client):
    return lambda **fields: client.post(
        "/v1/completions", json={"model": "demo", "prompt": PROMPT + BEFORE} | fields
    )


def test_marks_in_a_text_are_holes():
    assert parse_template("[[3]], Max=31. [[]]") == [3, ", Max=31. ", None]
    assert parse_template("[3] [[x]]") == ["[3] [[x]]"]


def test_texts_become_tokens_and_filled_tokens_texts(demo):
    tokenizer = demo.get_tokenizer()
    given = tokenizer.encode(", Max=31", add_special_tokens=False)
    template = tokenized([2, ", Max=31", None], tokenizer, 64).filled([1])
    assert template == [None, None, *given, None]
    filled = tokenizer.encode("17", add_special_tokens=False) + tokenizer.encode(
        "5", add_special_tokens=False
    )
    assert filled_in(filled, template, tokenizer, with_given=False) == ["17", "5"]
    whole = [*filled[:2], *given, *filled[2:]]
    assert filled_in(whole, template, tokenizer, with_given=True) == ["17", "5"]
    # An end token has ended the response in its first hole.
    assert filled_in(whole[:1], template, tokenizer, with_given=True) == ["1", ""]
    with pytest.raises(ValueError, match="no tokenizer"):
        tokenized([1, "a"], None, 64)
    with pytest.raises(ValueError, match=r"template\[0\]=True is neither"):
        tokenized([True], tokenizer, 64)


def test_what_belongs_between_two_texts(demo):
    (output,) = demo.infill(PROMPT + BEFORE, AFTER, DiffusionParams(gen_length=4))
    (completion,) = output.outputs
    assert (completion.text, completion.holes, completion.joined) == (
        WANTED,
        [WANTED],
        WANTED + AFTER,
    )
    assert len(completion.token_ids) == completion.diffusion.tokens_unmasked == 4
    assert completion.finish_reason == "length"
    assert_nothing_left(demo)


def test_a_hole_without_a_length_gets_the_one_that_belongs_there(demo):
    for arguments in ({}, {"sizes": (2, 4, 5, 30)}):
        (output,) = demo.infill(PROMPT + BEFORE, AFTER, **arguments)
        (completion,) = output.outputs
        assert (completion.text, completion.joined) == (WANTED, WANTED + AFTER)
    template = [" Tom=", None, ", Ida=", 2, None, ", Max=31"]
    for prompt in (PROMPT, CHAT):
        (output,) = demo.fill_in([prompt], [template])
        assert output.outputs[0].holes == ["48", "07", ""]
        assert output.outputs[0].joined == BEFORE + WANTED + AFTER


def test_nothing_may_belong_into_a_hole(demo):
    for n in (1, 2):
        params = DiffusionParams(n=n, temperature=0.1 if n > 1 else 0.0, logprobs=0)
        (output,) = demo.infill(PROMPT + BEFORE + WANTED, AFTER, params)
        first, *others = output.outputs
        assert (first.text, first.holes, first.token_ids) == ("", [""], [])
        assert (first.joined, first.finish_reason) == (AFTER, "stop")
        assert [len(other.token_ids) > 0 for other in others] == [True] * (n - 1)
    assert_nothing_left(demo)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": DiffusionParams(gen_length=4), "sizes": [2]}, "give one of them"),
        ({"sizes": [-1]}, "a hole has 0"),
        ({"suffix": "a " * 2000}, "max_model_len"),
        ({"suffix": ""}, "nothing is given behind"),
        ({"sizes": [2, 100_000]}, "need a canvas of at least 100"),
        ({"suffix": [AFTER, AFTER], "sizes": [2]}, "1 prefixes and 2 suffixes"),
        (
            {"params": SamplingParams(max_tokens=3)},
            "takes DiffusionParams for all prompts, not SamplingParams",
        ),
        ({"params": [DiffusionParams()], "sizes": [2]}, "not list"),
    ],
)
def test_what_cannot_be_filled_in_is_refused(demo, arguments, message):
    with pytest.raises(ValueError, match=message):
        demo.infill(**{"prefix": PROMPT, "suffix": AFTER} | arguments)


def test_holes_may_stand_side_by_side(demo):
    template = [" Tom=48, Ida=", 1, 1, AFTER]
    (output,) = demo.fill_in([PROMPT], [template])
    assert output.outputs[0].holes == ["0", "7"]
    assert output.outputs[0].joined == BEFORE + WANTED + AFTER


def test_samples_differ(demo):
    params = DiffusionParams(gen_length=12, n=3, temperature=2.0, seed=1)
    (output,) = demo.infill("Tom", "Ida", params)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3


BODIES: dict[str, Any] = {
    "/v1/completions": ({"prompt": PROMPT}, "max_tokens"),
    "/v1/chat/completions": ({"messages": CHAT}, "max_tokens", "max_completion_tokens"),
    "/v1/chat/completions/batch": ({"messages": [CHAT]}, "max_completion_tokens"),
    "/v1/responses": ({"input": CHAT}, "max_output_tokens"),
    "/v1/messages": ({"messages": CHAT}, "max_tokens"),
    "/invocations": ({"messages": CHAT}, "max_completion_tokens"),
}
"""The body of a request to each route, and the names of its length."""


def test_suffix_of_a_completion(complete):
    answer = complete(suffix=AFTER, max_tokens=4).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["holes"], answer["usage"]["completion_tokens"]) == (
        WANTED,
        [WANTED],
        4,
    )
    for budget in ({}, {"max_tokens": 4096}, {"max_tokens": 5, "temperature": 0.1}):
        answer = complete(suffix=AFTER, **budget).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (WANTED, "stop")
        assert answer["usage"]["completion_tokens"] == 4
    assert length_of(complete(suffix=AFTER, max_tokens=2)) <= 2
    longer = complete(suffix=AFTER, vllm_xargs={"block_length": 64}).json()
    assert longer["choices"][0]["text"] == choice["text"]
    chunks = chunks_of(complete(suffix=AFTER, max_tokens=4, stream=True))
    assert (
        "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        == WANTED
    )


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"]
)
def test_the_length_of_a_request_is_the_budget_of_its_hole(client, path):
    body, *names = BODIES[path]
    for name in names:
        asked = {"model": "demo", "suffix": ", Max=31", name: 300} | body
        answer = client.post(path, json=asked)
        assert length_of(answer) == 9, answer.text
        assert BEFORE + WANTED in answer.text
        assert length_of(client.post(path, json=asked | {name: 3})) <= 3
        assert "suffix" in refusal(client.post(path, json=asked | {"suffix": 7}))


def test_several_responses_have_the_best_lengths(complete, demo):
    answer = complete(suffix=AFTER, n=3).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert (texts[0], len(set(texts))) == (WANTED, 3)
    chunks = chunks_of(complete(suffix=AFTER, n=3, stream=True))
    streamed = ["", "", ""]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts
    assert_nothing_left(demo)


@pytest.mark.parametrize("stream", [False, True])
def test_a_hole_has_at_least_min_tokens(client, complete, demo, stream):
    asked = {"suffix": AFTER, "stream": stream, "min_tokens": 6}
    chat = {"messages": CHAT, "stream": stream, "model": "demo", "min_tokens": 12}
    for answer, least in (
        (complete(**asked, max_tokens=8), 6),
        (complete(**asked), 6),
        (client.post("/v1/chat/completions", json=chat | {"suffix": ", Max=31"}), 12),
    ):
        assert answer.status_code == 200, answer.text
        if not stream:
            assert length_of(answer) >= least
    refused = refusal(complete(**asked, max_tokens=4))
    assert "min_tokens=6: the hole may have at most 4 tokens" in refused
    params = DiffusionParams(min_tokens=6)
    (output,) = demo.infill(PROMPT + BEFORE, AFTER, params)
    assert len(output.outputs[0].token_ids) >= 6


def test_nothing_may_belong_before_a_suffix(complete, client):
    asked = {"prompt": PROMPT + BEFORE + WANTED, "suffix": AFTER}
    (choice,) = complete(**asked, logprobs=1).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    (chunk,) = chunks_of(complete(**asked, stream=True))
    (choice,) = chunk["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    body = {"model": "demo", "messages": CHAT, "stream": True}
    body["vllm_xargs"] = {
        "template": [BEFORE + WANTED, -1, AFTER],
        "return_given": False,
    }
    first, last = chunks_of(client.post("/v1/chat/completions", json=body))
    assert first["choices"][0]["delta"]["content"] == ""
    assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_with_empty_holes_comes_back_whole(complete, stream):
    asked = {"template": [BEFORE + WANTED, -1, AFTER]}
    answer = complete(vllm_xargs=asked, logprobs=0, stream=stream)
    (choice,) = (chunks_of(answer)[-1] if stream else answer.json())["choices"]
    assert choice["text"] == BEFORE + WANTED + AFTER
    assert {*choice["logprobs"]["token_logprobs"]} == {0.0}
    assert choice["finish_reason"] == "stop"


def test_templates_over_http(client, complete):
    template = [" Tom=", 2, ", Ida=", 2, ", Max=31"]
    chat = {"messages": CHAT, "vllm_xargs": {"template": template}}
    answer = client.post("/v1/chat/completions", json={"model": "demo"} | chat)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["holes"] == ["48", "07"]
    assert choice["message"]["content"] == BEFORE + WANTED + AFTER
    template[1] = -1
    answer = client.post("/v1/chat/completions", json={"model": "demo"} | chat)
    assert answer.json()["choices"][0]["holes"] == ["48", "07"]
    beside = {(1, 1): ["0", "7"], (1, -1): ["0", ""], ("07", -1): [""]}
    for parts, wanted in beside.items():
        asked = {"template": [" Tom=48, Ida=", *parts, AFTER]}
        assert complete(vllm_xargs=asked).json()["choices"][0]["holes"] == wanted
    holes = {"template": [WANTED, ", ", 4], "return_given": False}
    (choice,) = complete(vllm_xargs=holes).json()["choices"]
    assert choice["text"] == choice["holes"][0]
    tokens = complete(
        vllm_xargs={"response_template": "[null, 5, null]"}, return_token_ids=True
    ).json()
    assert tokens["choices"][0]["token_ids"][1] == 5, tokens


@pytest.mark.parametrize("path", BODIES)
def test_a_template_comes_back_whole_whatever_longer_length_is_asked_for(client, path):
    body, name, *_ = BODIES[path]
    template: dict[str, Any] = {
        "vllm_xargs": {"template": [" Tom=", 2, ", Ida=", 2, ", Max=31"]}
    }
    answers = [
        client.post(path, json={"model": "demo"} | body | template | {name: n})
        for n in (14, 100, 10**6, 13)
    ]
    assert [length_of(answer) for answer in answers[:3]] == [14] * 3
    assert BEFORE + WANTED + AFTER in answers[1].text
    assert "max_tokens=13" in refusal(answers[3])


@pytest.mark.parametrize("kind", [DiffusionParams, SamplingParams])
def test_in_python_too(demo, kind):
    template: dict[str, Any] = {"response_template": [None, 5, None]}
    given = (
        template
        if kind is DiffusionParams
        else {"extra_args": template, "temperature": 0.0}
    )
    for length in (3, 100, 10**6):
        (output,) = demo.generate(PROMPT, kind(max_tokens=length, **given))
        assert output.outputs[0].token_ids[1] == 5
        assert len(output.outputs[0].token_ids) == 3
    with pytest.raises(
        ValueError, match=r"max_tokens=2 .gen_length. is less than the 3 tokens"
    ):
        demo.generate(PROMPT, kind(max_tokens=2, **given))
    assert (
        demo.fill_in([PROMPT], [[" Tom=", 2]], DiffusionParams(gen_length=50))[0]
        .outputs[0]
        .text
        == "48"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suffix": AFTER, "echo": True}, "suffix is not supported with echo"),
        (
            {"suffix": AFTER, "vllm_xargs": {"template": [1, "a"]}},
            "suffix and a template",
        ),
        ({"vllm_xargs": {"template": [1, "<|endoftext|>"]}}, "special token"),
        ({"vllm_xargs": {"template": [4, AFTER * 400]}}, "max_model_len"),
        *[({"vllm_xargs": {"template": pieces}}, "no hole") for pieces in ([], ["a"])],
        ({"vllm_xargs": {"template": [1.5]}}, r"template\[0\]=1.5 is neither"),
        *[
            (
                {"vllm_xargs": {"template": ["a", n]}},
                rf"template\[1\]={n}: a hole has 1 or",
            )
            for n in (0, -2)
        ],
        (
            {"vllm_xargs": {"template": [1 << 20] * 30}},
            "holes of 31457280 tokens .* max_model_len",
        ),
        (
            {"vllm_xargs": {"template": ["a", 1] * 1000000}},
            "template has 2000000 entries",
        ),
        (
            {"vllm_xargs": {"template": [4, "a" * 1000000]}},
            "given texts of 1000000 characters",
        ),
        (
            {"vllm_xargs": {"response_template": "[" + "null," * 1000000}},
            "response_template has 5000001 characters",
        ),
        (
            {"vllm_xargs": {"response_template": '["a"' + ', "a"' * 500 + "]"}},
            "and (491|992) more errors",
        ),
        (
            {"vllm_xargs": {"template": [1, "a"], "response_template": "[null]"}},
            "give one",
        ),
        (
            {"vllm_xargs": {"template": [4, "a"]}, "max_tokens": 4},
            "max_tokens=4 .* is less than the 5 tokens",
        ),
        ({"vllm_xargs": {"response_template": "[1, 2]"}}, "nothing to fill in"),
        (
            {"vllm_xargs": {"response_template": "[null, 600]"}},
            "outside the vocabulary",
        ),
        ({"vllm_xargs": {"response_template": "[null, 2]"}}, "mask token"),
        ({"vllm_xargs": {"response_template": "[null, 1, 5]"}}, "an end token"),
        ({"vllm_xargs": {"return_given": False}}, "nothing is given"),
    ],
)
def test_bad_requests_are_answered_with_400(complete, demo, fields, message):
    assert re.search(message, refusal(complete(**fields)))
    assert_nothing_left(demo)
    assert complete(suffix=AFTER, max_tokens=4).json()["choices"][0]["text"] == WANTED


def test_others_are_served_while_a_template_is_tokenized(client, monkeypatch):
    slow, other = (
        {"prompt": [5], "vllm_xargs": {"template": [BEFORE, 2]}},
        {"prompt": [5, 6, 7], "max_tokens": 4},
    )
    answers = answered_meanwhile(
        client, slow, other, "dllm_engine.infill.http.tokenized", monkeypatch
    )
    assert [answer.status_code for answer in answers] == [200, 200]
