"""Structured output of the demo model, in Python and over HTTP."""

import json
import re
from typing import Any

import pytest
from openai import BadRequestError
from vllm.sampling_params import StructuredOutputsParams

from dllm_engine import DiffusionParams
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.structured_output import automata
from tests.support.engines import assert_nothing_left
from tests.support.http_app import answered_meanwhile, served

PROMPT = "User: Tom=48. Ida=07. Give: Ida, Tom\nBot:"
CHAT = [{"role": "user", "content": "Tom=48. Ida=07. Give: Ida, Tom"}]
REGEX, CHOICES = r"[a-z]{3,8} [0-9]{2}", ["yes", "no, never"]
WIDE = "[a-z ]*[aeiou][a-z ]{11}"
"""Its automaton has a state for each set of places that a vowel may have had."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ida", "Tom"]}, "is_old": {"type": "boolean"}},
    "required": ["name", "is_old"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {
            "name": "wait",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


def is_person(text):
    person = json.loads(text)
    return (
        person["name"] in ("Ida", "Tom")
        and type(person["is_old"]) is bool
        and len(person) == 2
    )


whole_and_streamed = pytest.mark.parametrize(
    "stream", [False, True], ids=["whole", "streamed"]
)
ASKED = {
    "regex": ({"regex": REGEX}, re.compile(REGEX).fullmatch),
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
    "json": ({"json": SCHEMA}, is_person),
    "json as text": ({"json": json.dumps(SCHEMA)}, is_person),
    "json_object": (
        {"json_object": True},
        lambda text: isinstance(json.loads(text), dict),
    ),
}


# Python


@pytest.mark.parametrize(
    "settings",
    [{}, {"block_length": 4}, {"threshold": 0.3}, {"temperature": 1.0, "seed": 3}],
)
@pytest.mark.parametrize(
    "against", [{"min_tokens": 9}, {"logits_eos_inf": True}, {"logit_bias": {1: -50.0}}]
)
def test_end_tokens_are_kept_away_as_far_as_a_text_allows(demo, settings, against):
    def ask(regex):
        structure = StructuredOutputsParams(regex=regex)
        params = DiffusionParams(
            gen_length=16, structured_outputs=structure, **settings, **against
        )
        return demo.chat(CHAT, params, use_tqdm=False)[0].outputs[0]

    answer = ask("[a-z]+( [a-z]+)*")
    assert re.fullmatch("[a-z]+( [a-z]+)*", answer.text)
    assert len(answer.token_ids) >= against.get("min_tokens", 16)
    if "min_tokens" in against:
        with pytest.raises(
            InvalidRequestError,
            match="min_tokens=9: no text that structured_outputs accepts is so long",
        ):
            ask("yes|no")
    else:
        assert ask("yes|no").text in ("yes", "no")


def test_what_nothing_else_may_follow_is_still_the_models_choice(demo):
    """That an end token has to be chosen in spite of all does not change what comes
    before it.
    """
    structure = StructuredOutputsParams(
        choice=[f"{a}{b}" for a in "ab" for b in "0123456789"]
    )
    asked = [
        DiffusionParams(structured_outputs=structure, gen_length=12, logits_eos_inf=x)
        for x in (False, True)
    ]
    texts = [
        output.outputs[0].text
        for output in demo.chat([CHAT] * 2, asked, use_tqdm=False)
    ]
    assert texts[0] == texts[1]


# HTTP

FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def chunks_of(events):
    return [
        json.loads(line[6:])
        for line in events.splitlines()
        if line.startswith("data: {")
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {"grammar": "root ::= 'a'"}}, "grammar"),
        ({"structured_outputs": {"regex": 5}}, "regex"),
        ({"structured_outputs": {}}, "one kind of structured outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "one kind"),
        ({"structured_outputs": "a"}, "structured_outputs is a str, not an object"),
        (
            {"structured_outputs": {"regex": "[a-z]{60}"}, "max_tokens": 8},
            "gen_length=8 .max_tokens. is too short",
        ),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "grammar"}}, "response_format|grammar"),
        ({"vllm_xargs": {"constraint": "x"}}, "unknown request option 'constraint'"),
        ({"vllm_xargs": {"reasoning": "x"}}, "unknown request option 'reasoning'"),
        ({"tools": TOOLS, "tool_choice": "required", "max_tokens": 2}, "too short"),
    ],
    ids=str,
)
@whole_and_streamed
def test_bad_requests_are_answered_with_400(openai, demo, fields, message, stream):
    with pytest.raises(BadRequestError, match=message):
        openai.chat.completions.create(
            model="demo",
            messages=CHAT,
            stream=stream,
            extra_body={"max_tokens": 48} | fields,
        )
    assert_nothing_left(demo)


CHAT_SCHEMA = {
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}
}
ROUTES: dict[str, Any] = {
    "/v1/completions": {"prompt": PROMPT, "structured_outputs": {"regex": "(a"}},
    "/v1/chat/completions": {"messages": CHAT, "structured_outputs": {"regex": "(a"}},
    "/v1/chat/completions/batch": {
        "messages": [CHAT, CHAT],
        "structured_outputs": {"regex": "(a"},
    },
    "/v1/responses": {"input": PROMPT, **CHAT_SCHEMA},
    "/inference/v1/generate": {
        "token_ids": [5, 6],
        "sampling_params": {"structured_outputs": {"regex": "(a"}},
    },
}


@whole_and_streamed
@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_begins_when_its_automaton_is_built(demo, route, stream):
    """What is wrong with the expression or schema is known then, and answered with a
    status.
    """
    client = served(demo, "--served-model-name", "demo", "--enable-scale-out")
    asked = (
        {"model": "demo", "stream": True}
        if stream and "batch" not in route
        else {"model": "demo"}
    )
    answer = client.post(route, json=asked | ROUTES[route])
    assert answer.status_code == 400, answer.text
    assert re.search(
        "not a regex that Python can read|the keyword 'not'",
        answer.json()["error"]["message"],
    )


@whole_and_streamed
def test_a_full_queue_of_builds_is_answered_with_503(client, monkeypatch, stream):
    monkeypatch.setattr(automata, "_cache", automata._Cache())
    monkeypatch.setattr(automata, "MOST_WAITING", -automata._AT_ONCE)
    body = {
        "model": "demo",
        "prompt": PROMPT,
        "structured_outputs": {"regex": "a"},
        "stream": stream,
    }
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 503, answer.text
    assert "send the request again later" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "positions"),
    [
        ({"vllm_xargs": {"block_length": 200}}, 200),
        ({"ignore_eos": True}, 200),
        ({"vllm_xargs": {"block_add_threshold": 0.5, "threshold": 0.9}}, 200),
        ({}, None),
    ],
)
def test_what_a_step_searches_is_bounded_by_its_positions(client, options, positions):
    body = {
        "model": "demo",
        "prompt": PROMPT,
        "max_tokens": 200,
        "structured_outputs": {"regex": WIDE},
    } | options
    answer = client.post("/v1/completions", json=body)
    if positions is None:
        assert re.fullmatch(WIDE, answer.json()["choices"][0]["text"])
    else:
        assert answer.status_code == 400, answer.text
        assert re.search(
            f"searches {positions} positions of an automaton of size [0-9]+, .* "
            f"max_automaton_search is 16777216",
            answer.json()["error"]["message"],
        )


def test_a_tool_parser_leaves_the_model_free_to_make_no_call(demo):
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    client = served(demo, "--served-model-name", "demo", *flags)
    body = {"model": "demo", "messages": CHAT, "tools": TOOLS, "max_tokens": 64}
    for more in ({}, {"tool_choice": "none"}):
        answer = client.post("/v1/chat/completions", json=body | more)
        message = answer.json()["choices"][0]["message"]
        assert message["content"].startswith(" Ida=07"), answer.text
        assert not message.get("tool_calls")


def test_tokens_in_and_out(demo):
    client = served(demo, "--served-model-name", "demo", "--enable-scale-out")
    asked: dict[str, Any] = {
        "max_tokens": 16,
        "structured_outputs": {"regex": "tok(ens)?"},
    }
    answer = client.post(
        "/inference/v1/generate",
        json={"token_ids": [5, 6, 7], "sampling_params": asked},
    )
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(
        "tok(ens)?",
        demo.get_tokenizer().decode(answer.json()["choices"][0]["token_ids"], True),
    )


def test_others_are_served_while_an_automaton_is_built(client, monkeypatch):
    slow = {
        "prompt": PROMPT,
        "max_tokens": 16,
        "structured_outputs": {"regex": "built(once)?"},
    }
    constrained, plain = answered_meanwhile(
        client,
        slow,
        {"prompt": PROMPT, "max_tokens": 16},
        "dllm_engine.structured_output.automata._build_apart",
        monkeypatch,
    )
    assert plain.json()["choices"][0]["text"] == " Ida=07, Tom=48"
    assert re.fullmatch("built(once)?", constrained.json()["choices"][0]["text"])
