"""A text matches and is never reported as cut off: by every way in, where it fills the
response exactly too.
"""

import json
import re
from itertools import cycle
from typing import Any

import pytest
from openai import BadRequestError
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from dllm_engine import DiffusionParams
from tests.structured_output.test_answers import (
    ASKED,
    CHAT,
    FORMAT,
    PROMPT,
    SCHEMA,
    TOOLS,
    chunks_of,
    is_person,
    whole_and_streamed,
)
from tests.support.engines import matching
from tests.support.http_app import choices_of

FORMS: dict[str, Any] = {
    name: ({"structured_outputs": fields}, matches)
    for name, (fields, matches) in ASKED.items()
}
FORMS["format: schema"] = {"response_format": FORMAT}, is_person
FORMS["format: object"] = (
    {"response_format": {"type": "json_object"}},
    ASKED["json_object"][1],
)
UNBOUNDED = ["[a-z]+", r"[0-9]{3}.*", "(ab|c)*"]


def fewest_tokens(ask) -> int:
    """The length of the shortest text that matches, which a shorter response is refused
    with.
    """
    with pytest.raises((BadRequestError, ValueError)) as refused:
        ask(1)
    return int(re.search(r"accepts has (\d+) tokens", str(refused.value))[1])


def posted(client, path, **body):
    answer = client.post(f"/v1/{path}", json={"model": "demo"} | body)
    if answer.status_code != 200:
        raise ValueError(answer.text)
    return answer


@whole_and_streamed
@pytest.mark.parametrize(
    ("form", "path"), list(zip(FORMS, cycle(["completions", "chat/completions"])))
)
def test_completions_and_chats(client, form, path, stream):
    fields, matches = FORMS[form]
    body = fields | (
        {"prompt": PROMPT} if path == "completions" else {"messages": CHAT}
    )
    fewest = fewest_tokens(
        lambda length: posted(client, path, max_tokens=length, **body)
    )
    sampled = {"n": 2, "temperature": 1.0, "seed": 1, "stream": stream}
    for length in (fewest, 48):
        answer = posted(client, path, max_tokens=length, **body, **sampled)
        choices = choices_of(answer)
        assert all(matches(choice["content"]) for choice in choices), choices
        assert [choice["finish_reason"] for choice in choices] == ["stop"] * 2


@whole_and_streamed
@pytest.mark.parametrize(
    ("named", "reason"),
    [(False, "tool_calls"), (True, "stop")],
    ids=["required", "named"],
)
def test_calls(openai, named, reason, stream):
    choice = (
        {"type": "function", "function": {"name": "look_up"}} if named else "required"
    )

    def ask(length, **asked):
        asked |= {
            "model": "demo",
            "messages": CHAT,
            "tools": TOOLS,
            "tool_choice": choice,
            "max_tokens": length,
        }
        return openai.chat.completions.create(**asked)

    for length in (fewest_tokens(ask), 64):
        answer = ask(length, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert choices[-1].finish_reason == reason
        calls: dict[int, list[str]] = {}
        for message in (
            choice.delta if stream else choice.message for choice in choices
        ):
            assert not message.content
            for index, part in enumerate(message.tool_calls or ()):
                call = calls.setdefault(part.index if stream else index, ["", ""])
                call[0] += part.function.name or ""
                call[1] += part.function.arguments or ""
        assert calls
        for name, arguments in calls.values():
            assert (
                is_person(arguments)
                if name == "look_up"
                else name == "wait" and type(json.loads(arguments)) is dict
            )


@whole_and_streamed
def test_responses(openai, stream):
    schema = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}

    def ask(length, **asked):
        return openai.responses.create(
            model="demo", input="Ida?", text=schema, max_output_tokens=length, **asked
        )

    answer = ask(fewest_tokens(ask), stream=stream)
    answer = [*answer][-1].response if stream else answer
    assert answer.status == "completed"
    assert is_person(answer.output_text)


@whole_and_streamed
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "end_turn",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_use"),
        ({"tool_choice": {"type": "tool", "name": "look_up"}}, "tool_use"),
    ],
    ids=["format", "any", "named"],
)
def test_messages(client, body, reason, stream):
    if "tool_choice" in body:
        body = body | {"tools": [{"name": "look_up", "input_schema": SCHEMA}]}

    def ask(length, **asked):
        return posted(
            client, "messages", messages=CHAT, max_tokens=length, **body, **asked
        )

    answer = ask(fewest_tokens(ask), stream=stream)
    messages = (
        [chunk.get("delta", {}) for chunk in chunks_of(answer.text)]
        if stream
        else [answer.json()]
    )
    assert [m["stop_reason"] for m in messages if m.get("stop_reason")] == [reason]


@pytest.mark.parametrize("params", [DiffusionParams, SamplingParams])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_texts_that_could_go_on(demo, params, ignore_eos):
    for regex in UNBOUNDED:
        asked = params(
            structured_outputs=StructuredOutputsParams(regex=regex),
            max_tokens=9,
            ignore_eos=ignore_eos,
            temperature=1.0,
            n=3,
            seed=2,
        )
        (output,) = demo.generate([PROMPT], asked, use_tqdm=False)
        for completion in output.outputs:
            assert re.fullmatch(regex, completion.text, re.DOTALL), completion
            assert completion.finish_reason == "stop"
            assert completion.stop_reason is None
        assert asked.structured_outputs.regex == regex


def test_templates(demo):
    tokens = demo.get_tokenizer().encode(" Ida=07", add_special_tokens=False)
    for given in (True, False):
        template = [*tokens[:-2], None, None]
        settings = {"response_template": template, "return_given": given}
        (completion,) = matching(demo, PROMPT, r" Ida=[0-9]{2}", **settings)
        assert completion.finish_reason == "stop"
        assert re.fullmatch(r" Ida=[0-9]{2}" if given else "[0-9]{2}", completion.text)


def test_a_stop_string_still_ends_a_text_before_it(demo):
    settings = {"gen_length": 7, "stop": [";"]}
    (completion,) = matching(demo, PROMPT, "[0-9]{6};", **settings)
    assert (len(completion.text), completion.finish_reason, completion.stop_reason) == (
        6,
        "stop",
        ";",
    )
