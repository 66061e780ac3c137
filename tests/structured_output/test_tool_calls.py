"""``tool_choice`` as agents' frameworks send it, on a server that was started without
flags for tools.
"""

import shlex
from argparse import Namespace
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

from dllm_engine import DiffusionParams
from dllm_engine.demo import model_path
from dllm_engine.request_options.sampling_params import ResponseLimit
from dllm_engine.structured_output.tool_calls import parser_for, serve_tool_calls
from tests.structured_output.test_answers import whole_and_streamed
from tests.support.http_app import choices_of, refusal, served

QUESTION = "Tom=48. Ida=07. Give: Tom"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
FUNCTION = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": CITY,
}
CHAT = {
    "messages": [{"role": "user", "content": QUESTION}],
    "tools": [{"type": "function", "function": FUNCTION}],
}
RESPONSE = {"input": QUESTION, "tools": [{"type": "function", **FUNCTION}]}
MESSAGE = {
    "max_tokens": 32,
    "messages": [{"role": "user", "content": QUESTION}],
    "tools": [
        {
            "name": "get_weather",
            "description": "The weather of a city.",
            "input_schema": CITY,
        }
    ],
}
ROUTES: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
}
HERMES_TEMPLATE = """{%- if tools %}# Tools
For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>{%- endif %}"""
XML_TEMPLATE = "{% if tools %}<tool_call><function=name><parameter=arguments></tool_call>{% endif %}"


def text_of(answer):
    body = answer.json()
    if "choices" in body:
        return choices_of(answer)[0]["content"]
    parts = body["output"][0]["content"] if "output" in body else body["content"]
    return parts[0]["text"]


@pytest.mark.parametrize(
    "asked", [{}, {"tool_choice": "auto"}], ids=["by default", "by name"]
)
@pytest.mark.parametrize("route", ROUTES)
def test_the_model_is_free_to_answer_without_a_call(client, route, asked):
    if route == "/v1/messages" and asked:
        asked = {"tool_choice": {"type": "auto"}}
    answer = client.post(route, json={"model": "demo"} | ROUTES[route] | asked)
    assert text_of(answer).startswith(" Tom=48")


def test_a_stream_brings_the_text_of_an_answer_without_a_call(client):
    body = {"model": "demo", "stream": True} | CHAT
    (choice,) = choices_of(client.post("/v1/chat/completions", json=body))
    assert choice["content"].startswith(" Tom=48")


@whole_and_streamed
def test_a_default_length_grows_to_what_a_call_that_must_be_made_needs(client, stream):
    """The checkpoint's default of 32 tokens is too short for any call."""
    body = {"model": "demo", "tool_choice": "required", "stream": stream} | CHAT
    assert "gen_length=32 (max_tokens) is too short" in refusal(
        client.post("/v1/chat/completions", json=body | {"max_tokens": 32})
    )
    (choice,) = choices_of(client.post("/v1/chat/completions", json=body))
    assert choice["finish_reason"] == "tool_calls"


def test_a_response_tells_the_length_that_it_grew_to(client):
    body = {"model": "demo", "tool_choice": "required"} | RESPONSE
    answer = client.post("/v1/responses", json=body).json()
    assert answer["max_output_tokens"] >= answer["usage"]["output_tokens"] > 32
    assert answer["output"][0]["name"] == "get_weather"


@pytest.mark.parametrize(("expression", "length"), [("a{12}", 32), ("(abc){40}", None)])
def test_a_default_length_is_twice_the_shortest_text_where_that_is_more(
    demo, expression, length
):
    """``ignore_eos`` would need a text as long as the response; without it the text
    ends where it is complete.
    """
    from dllm_engine.admission import resolved_params

    params = DiffusionParams(
        structured_outputs=StructuredOutputsParams(regex=expression)
    )
    settled = resolved_params(
        params, [5, 6], demo.get_tokenizer(), demo.llm_engine.vllm_config
    )
    (output,) = demo.generate("User: Hi!\nBot:", params, use_tqdm=False)
    if length is None:
        length = 2 * len([token for token in output.outputs[0].token_ids if token != 1])
    assert settled.max_tokens == length


def test_a_default_length_does_not_grow_above_the_context_and_the_servers_limit(
    demo, monkeypatch
):
    from dllm_engine.admission import resolved_params

    config = demo.llm_engine.vllm_config
    params = DiffusionParams(
        structured_outputs=StructuredOutputsParams(regex="(abc){40}")
    )
    prompt = [5] * (config.model_config.max_model_len - 50)
    assert (
        resolved_params(params, prompt, demo.get_tokenizer(), config).max_tokens == 50
    )
    monkeypatch.setattr(config.model_config, "dllm_response_limit", 32)
    assert resolved_params(params, [5], demo.get_tokenizer(), config).max_tokens == 32


@pytest.mark.parametrize("max_tokens", [1024, 4096, 16384])
@whole_and_streamed
def test_a_length_of_messages_is_the_most_that_fits(client, max_tokens, stream):
    body = {"model": "demo", "stream": stream} | MESSAGE | {"max_tokens": max_tokens}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        assert '"text_delta"' in answer.text
    else:
        assert answer.json()["stop_reason"] == "end_turn"
        assert text_of(answer).startswith(" Tom=")


def test_a_length_of_messages_stays_within_the_servers_limit_and_others_are_refused(
    client, monkeypatch
):
    for name in ("anthropic_serving_messages", "openai_serving_chat"):
        defaults = getattr(client.app.state, name).default_sampling_params
        monkeypatch.setitem(defaults, "max_tokens", ResponseLimit(16))
    fields = {"model": "demo", "vllm_xargs": {"block_length": 16}, "tools": None}
    messages = client.post("/v1/messages", json=MESSAGE | fields | {"max_tokens": 4096})
    assert text_of(messages) == " Tom=48"
    chats = client.post("/v1/chat/completions", json=CHAT | fields | {"max_tokens": 17})
    assert "above this server's limit of 16" in refusal(chats)


def test_prompt_and_response_beyond_the_context_are_refused_on_other_routes(
    client, demo
):
    longest = demo.model_config.max_model_len
    body = {"model": "demo", "messages": MESSAGE["messages"], "max_tokens": longest}
    assert f"max_model_len is {longest}" in refusal(
        client.post("/v1/chat/completions", json=body)
    )


def test_a_server_that_cannot_read_calls_says_what_to_type(demo, tmp_path):
    template = tmp_path / "plain.jinja"
    template.write_text(
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    client = served(
        demo, "--served-model-name", "demo", "--chat-template", str(template)
    )
    message = refusal(
        client.post("/v1/chat/completions", json={"model": "demo"} | CHAT)
    )
    assert message.startswith(
        'tool_choice="auto": this server does not know how the model writes calls'
    )
    program, verb, *arguments = shlex.split(
        message.partition("for example: ")[2].partition(". Or set")[0]
    )
    assert (program, verb, arguments[0]) == ("dllm", "serve", "demo")
    named = served(
        demo,
        "--served-model-name",
        "demo",
        "--chat-template",
        str(template),
        *arguments[1:],
    )
    assert (
        named.post("/v1/chat/completions", json={"model": "demo"} | CHAT).status_code
        == 200
    )


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (HERMES_TEMPLATE, "hermes"),
        (XML_TEMPLATE, None),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_a_parser_is_taken_for_the_form_that_a_template_describes(template, parser):
    assert parser_for(template) == parser


def test_flags_of_the_user_come_first(demo):
    arguments = {"model": model_path("demo"), "chat_template": None}
    free = Namespace(
        **arguments, enable_auto_tool_choice=True, tool_call_parser="pythonic"
    )
    serve_tool_calls(free, demo.model_config)
    assert (free.enable_auto_tool_choice, free.tool_call_parser) == (True, "pythonic")
