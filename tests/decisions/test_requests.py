"""Decisions of the demo model by text: in Python, over HTTP, and
with OpenAI's client.
"""

import json
import re
from typing import Any

import pytest
from openai import BadRequestError

from dllm_engine.decisions.fields import read_fields
from dllm_engine.decisions.requests import decision_params, schema_of
from dllm_engine.model_executor.constraints.running_decision import RunningDecision
from dllm_engine.request_options.errors import InvalidRequestError
from tests.support.engines import assert_nothing_left

PROMPT = "Tom=48. Ida=07. Give: Ida, Tom"
CHAT = [{"role": "user", "content": PROMPT}]
FIELDS: dict[str, Any] = {
    "name": ["Ida", "Tom", "Zoe"],
    "is_old": bool,
    "code": range(100),
    "id": re.compile("[A-Z]{2}[0-9]"),
    "many": range(-5, 5000),
    "any": ["", 3, None, 'a "quoted" word', 2.5],
}
SCHEMA = schema_of(FIELDS)
OPTIONAL = {"type": "object", "properties": {"name": {"enum": ["Ida", "Tom"]}}}


def matching(schema):
    """What asks for a text of a schema as ``response_format``."""
    return {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}


def is_valid(values):
    return (
        [*values] == [*FIELDS]
        and values["name"] in FIELDS["name"]
        and values["is_old"] in (True, False)
        and values["code"] in FIELDS["code"]
        and FIELDS["id"].fullmatch(values["id"])
        and values["many"] in FIELDS["many"]
        and values["any"] in FIELDS["any"]
    )


@pytest.mark.parametrize("passes", [1, 3])
def test_in_python(demo, passes):
    by_chat, again = demo.decide([CHAT, CHAT], FIELDS, passes=passes, top_k=3)
    assert by_chat.values == again.values == json.loads(by_chat.text)
    assert by_chat.text == json.dumps(by_chat.values, ensure_ascii=False)
    assert is_valid(by_chat.values)
    assert by_chat.figures.forward_passes == passes
    for name, distribution in by_chat.distributions.items():
        shares = [each["probability"] for each in distribution]
        assert (
            shares == sorted(shares, reverse=True)
            or by_chat.values[name] == distribution[-1]["value"]
        )
        chosen = [
            each["probability"]
            for each in distribution
            if each["value"] == by_chat.values[name]
        ]
        assert by_chat.probabilities[name] in chosen
        assert sum(shares) == pytest.approx(1) or (
            name in ("id", "many") and len(shares) == 3 and sum(shares) < 1
        )
    assert_nothing_left(demo)


def test_a_text_is_one_prompt_and_a_failure_costs_no_other_answer(demo, monkeypatch):
    fields = {"name": FIELDS["name"]}
    (alone,) = demo.decide("Tom", fields)
    commit, calls = RunningDecision.commit, []

    def failing_once(self, *args, **kwargs):
        calls.append(self)
        return 1 / 0 if len(calls) == 1 else commit(self, *args, **kwargs)

    monkeypatch.setattr(RunningDecision, "commit", failing_once)
    failed, other = demo.decide(["Tom", "Tom"], fields)
    assert failed.values == {}
    assert "ZeroDivisionError" in failed.figures.error
    assert other.values == alone.values


def test_over_http(client, demo):
    (expected,) = demo.decide([CHAT], FIELDS, passes=2)
    body = {"model": "demo", "messages": CHAT, "fields": SCHEMA, "passes": 2}
    response = client.post("/v1/decisions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["values"] == expected.values
    assert answer["text"] == expected.text
    assert answer["diffusion"]["forward_passes"] == 2
    assert not answer["diffusion"].keys() & {"trace", "decision"}
    assert answer["usage"]["completion_tokens"] > 0
    for name, field in answer["fields"].items():
        assert field["value"] == expected.values[name]
        assert field["probability"] == pytest.approx(
            expected.probabilities[name], abs=1e-5
        )
    prompt = demo.get_tokenizer().apply_chat_template(
        CHAT, add_generation_prompt=True, tokenize=False
    )
    again = client.post(
        "/v1/decisions", json={"prompt": prompt, "fields": SCHEMA, "passes": 2}
    )
    assert again.json()["values"] == expected.values


def test_response_format_with_logprobs(openai, demo):
    """The tokens' log-probabilities say the same as the fields'."""
    schema = schema_of({"name": ["Ida", "Tom"], "is_old": bool})
    (expected,) = demo.decide([CHAT], schema)
    wanted = matching(schema)
    (choice,) = openai.chat.completions.create(
        model="demo",
        messages=CHAT,
        response_format=wanted,
        logprobs=True,
        top_logprobs=2,
    ).choices
    assert json.loads(choice.message.content) == expected.values
    assert choice.finish_reason == "stop"
    figures = choice.model_extra["diffusion"]
    assert figures["forward_passes"] == 1
    for name, field in figures["decision"].items():
        assert field["probability"] == pytest.approx(
            expected.probabilities[name], abs=1e-5
        )
    (completion,) = openai.completions.create(
        model="demo", prompt=PROMPT, logprobs=1, extra_body={"response_format": wanted}
    ).choices
    assert (
        completion.model_extra["diffusion"]["decision"].keys() == expected.values.keys()
    )


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": None},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"extra_body": {"top_k": 5}},
        {"extra_body": {"stop_token_ids": [400]}},
        {"max_tokens": 3},
        {"stream": True},
        {"extra_body": {"vllm_xargs": {"steps": 8}}},
        *(
            {"response_format": matching(schema)}
            for schema in (
                OPTIONAL,
                {"type": "array"},
                schema_of({"a": ["Ida"]}),
                schema_of({"a": re.compile("[a-z]+")}),
            )
        ),
    ],
)
def test_other_requests_generate_their_text(openai, change):
    wanted = matching(schema_of({"name": ["Ida", "Tom"]}))
    asked = {"response_format": wanted, "logprobs": True, "max_tokens": 24} | change
    if change == {"max_tokens": 3}:
        with pytest.raises(BadRequestError, match="too short for structured_outputs"):
            openai.chat.completions.create(model="demo", messages=CHAT, **asked)
        return
    answer = openai.chat.completions.create(model="demo", messages=CHAT, **asked)
    choices = (
        [choice for part in answer for choice in part.choices]
        if "stream" in change
        else answer.choices
    )
    assert all(
        "decision" not in (choice.model_extra or {}).get("diffusion", {})
        for choice in choices
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "0 properties"),
        ({"a": {"type": "string"}}, r"fields\.a: .* is not supported"),
        (
            {"a": {"type": "string", "pattern": "[a-z]+"}},
            r"fields\.a: its texts have no longest one",
        ),
        ({"a": {"type": "string", "pattern": "^(?=a)$"}}, r"^fields\.a: .*pattern"),
        (
            {"a": {"type": "integer", "minimum": 3}},
            r"fields\.a: give an integer a minimum, and a maximum",
        ),
        (
            {"a": {"type": "integer", "minimum": 3, "maximum": 2}},
            r"fields\.a: give an integer",
        ),
        (
            {"a": {"enum": [1, -(2**63) - 1]}},
            r"fields\.a: -9223372036854775809… has more than 64 bits",
        ),
        (
            {"a": {"type": "integer", "minimum": 3, "maximum": 10**400}},
            r"fields\.a: 10{29}… has more than 64 bits",
        ),
        ({"a": {"enum": []}}, r"fields\.a: enum is a list"),
        ({"a": {"enum": [[1]]}}, r"fields\.a: the choice \[1\]"),
        (
            {"a": {"type": "string", "enum": [1]}},
            r"fields\.a: the choice 1 is not of type string",
        ),
        ({"a": {"enum": ["<|mdm_mask|>"]}, "b": {"type": "boolean"}}, "mask"),
        ({"a": {"enum": ["only one"]}}, "nothing is left to decide"),
        ({"a": {"$ref": "#"}}, r"fields\.a: "),
        ({"a": True}, r"fields\.a: True is not a schema"),
    ],
)
def test_a_field_that_a_decision_cannot_have_is_named(client, demo, fields, message):
    body = {
        "model": "demo",
        "prompt": PROMPT,
        "fields": {"type": "object", "properties": fields},
    }
    response = client.post("/v1/decisions", json=body)
    assert response.status_code == 400, response.text
    assert re.search(message, response.json()["error"]["message"])
    with pytest.raises(ValueError, match=message):
        demo.decide([PROMPT], {"type": "object", "properties": fields})
    assert_nothing_left(demo)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stream": True}, "stream: all fields"),
        ({"passes": 0}, "passes"),
        ({"fields": [1]}, "fields"),
        (
            {
                "fields": {
                    "type": "object",
                    "properties": {"a": {"enum": [1, 2]}},
                    "minProperties": 3,
                }
            },
            "no other rules",
        ),
        ({"temperature": 0.5}, "temperature"),
        ({"prompt": None}, "give either prompt or messages"),
        ({"prompt": [1] * 5000}, "max_model_len|context length"),
        ({"model": "another"}, "another"),
    ],
)
def test_a_bad_body_is_refused(client, demo, change, message):
    fields = schema_of({"name": ["Ida", "Tom"]})
    response = client.post(
        "/v1/decisions",
        json={"model": "demo", "prompt": PROMPT, "fields": fields} | change,
    )
    assert response.status_code in (400, 404), response.text
    assert re.search(message, response.text)
    assert_nothing_left(demo)


def test_a_template_is_decided_as_text(client, demo):
    """The demo model gives its own form of an answer, with every kind of field, in any
    order.
    """
    fields = {
        "Tom": re.compile("[0-9]{2}"),
        "Ida": ["07", "48", "99"],
        "x": bool,
        "n": range(2000),
    }
    template = " Ida={Ida}, Tom={Tom}{{{x}}}{n}"
    (decision,) = demo.decide([CHAT], fields, template=template)
    assert decision.values["Ida"] == "07"
    assert [*decision.values] == ["Ida", "Tom", "x", "n"]
    shown = decision.values | {"x": json.dumps(decision.values["x"])}
    assert decision.text == template.format(**shown)
    assert isinstance(decision.values["n"], int)
    body = {"messages": CHAT, "fields": schema_of(fields), "template": template}
    answer = client.post("/v1/decisions", json=body).json()
    assert answer["values"] == decision.values
    (alone,) = demo.decide(
        [CHAT],
        {"Ida": ["07", "48"], "Tom": ["48", "07"]},
        template=" Ida={Ida}, Tom={Tom}",
    )
    assert alone.values == {"Ida": "07", "Tom": "48"}
    assert min(alone.probabilities.values()) > 0.9


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("no field", "does not hold each field once"),
        ("{a}{a}", "does not hold each field once"),
        ("{b}", "{b} is not a field"),
        ("{a!r}", "{a} is not a field"),
        ("{a", "template: "),
        ("{a}", "a choice has no text"),
        ("\ud800{a}", "not valid Unicode"),
        ("x" * 70_000 + "{a}", "more than the 65536"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(demo, template, message):
    with pytest.raises(InvalidRequestError, match=message):
        demo.decide([PROMPT], {"a": ["", "1"]}, template=template)
    with pytest.raises(InvalidRequestError, match="same text"):
        demo.decide([PROMPT], {"a": ["1", 1, True]}, template="{a}")


def test_texts_of_several_lengths_need_an_end_token(demo):
    config, tokenizer = demo.llm_engine.vllm_config, demo.get_tokenizer()
    for choices, is_refused in ((["a", "b"], False), (["a", "a longer text"], True)):
        params = decision_params(
            schema_of({"x": choices}), tokenizer, config, template="{x}"
        )
        params.ignore_eos, params.logprobs = True, 5
        if is_refused:
            with pytest.raises(
                ValueError,
                match="no end token may follow a shorter one; leave ignore_eos unset",
            ):
                demo.generate(["Tom"], params)
        else:
            assert demo.generate(["Tom"], params)[0].outputs[0].text in choices
    assert_nothing_left(demo)


def test_fields_in_python():
    fields = read_fields(schema_of({"a": bool, "b": range(3), "c": [1, True, 1]}))
    assert [field.values for field in fields] == [[True, False], range(3), [1, True]]
    for wrong in (
        int,
        range(0),
        [],
        "text",
        {1, 2},
        re.compile("a", re.IGNORECASE),
        re.compile(b"a"),
    ):
        with pytest.raises(InvalidRequestError, match=r"fields\.a="):
            schema_of({"a": wrong})
