"""Structured output behind reasoning, as vLLM's reasoning parsers read it."""

import asyncio
import copy
import json
import random
import re
import shutil
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import StructuredOutputsParams

from dllm_engine import DiffusionParams
from dllm_engine.constraints.automaton import joined
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.structured_output.build import BuildInput, Grammar, build
from dllm_engine.structured_output.requests import (
    Constraints,
    ReasoningArguments,
    vocabulary_of,
)
from dllm_engine.vllm_hooks import patch, table
from tests.structured_output.test_answers import (
    CHAT,
    FORMAT,
    PROMPT,
    SCHEMA,
    TOOLS,
    chunks_of,
    is_person,
    whole_and_streamed,
)
from tests.support.automaton_walks import walk
from tests.support.byte_level_tokenizers import TALE, train_tokenizer
from tests.support.engines import assert_nothing_left, matching
from tests.support.http_app import EngineInProcess, choices_of, openai_client, served

MARKERS = "<think> </think> <seed:think> </seed:think> <mm:think> </mm:think> <tool_call> </tool_call>".split()
MARKERS += "<response> </response> [THINK] [/THINK] <|START_THINKING|> <|END_THINKING|> <|im_end|>".split()
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}<think>"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
)
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@cache
def tokenizer_of(has_markers: bool):
    """``has_markers``: with a token for each marker."""
    tokenizer = train_tokenizer(TALE, 400, "<|end|>")
    if has_markers:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_tokens([AddedToken(marker, special=False) for marker in MARKERS])
    return tokenizer


@cache
def automaton_of(grammar: Grammar, has_markers: bool):
    return build(
        BuildInput(grammar, vocabulary_of(tokenizer_of(has_markers), 512), 4096, 60)
    )


def engine_config(parser: str, *, enable_in_reasoning: bool = False):
    settings = {
        "reasoning_parser": parser,
        "reasoning_parser_plugin": "",
        "enable_in_reasoning": enable_in_reasoning,
    }
    return SimpleNamespace(structured_outputs_config=SimpleNamespace(**settings))


def reasoning_before(prompt, tokenizer, vllm_config, ended=None):
    structured = StructuredOutputsParams(regex="[0-9]")
    return Constraints(
        structured, ReasoningArguments(ended), tokenizer, vllm_config
    ).reasoning_before(prompt)


@pytest.mark.parametrize("parser", ReasoningParserManager.list_registered())
@pytest.mark.parametrize("has_markers", [True, False], ids=["tokens", "text"])
def test_every_parser_reads_what_is_written(parser, has_markers):
    """Or says that it cannot be used, in a refusal that names it."""
    tokenizer = tokenizer_of(has_markers)
    arguments = {"tokenizer": tokenizer, "vllm_config": engine_config(parser)}
    prompt = tokenizer.encode("There once was")
    grammar, refusal = None, ""
    try:
        grammar = reasoning_before(prompt, **arguments)
    except InvalidRequestError as error:
        refusal = str(error)
    if refusal:
        assert f"reasoning_parser='{parser}'" in refusal
        return
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "?"}], model="m"
    )

    def content(text: str) -> str | None:
        found = ReasoningParserManager.get_reasoning_parser(parser)(
            tokenizer
        ).extract_reasoning(text, request)
        return found and found[1]  # Cohere's read nothing by themselves

    assert reasoning_before(prompt, **arguments, ended=True) is None
    if (
        grammar is None
    ):  # as vLLM, for parsers that reason only behind a marker in the prompt
        return
    end = json.loads(grammar.text)[0]
    assert reasoning_before(prompt, **arguments, ended=False) == grammar
    if has_markers and end in MARKERS:
        assert reasoning_before([*prompt, *tokenizer.encode(end)], **arguments) is None
    if content(f'Hm{end}{{"a": 1}}') != '{"a": 1}':
        return  # it wants more markers than these
    automata = (
        automaton_of(each, has_markers)
        for each in (grammar, Grammar("regex", r'\{"a": [0-9]+\}'))
    )
    spelled = [tokenizer.decode([token]).encode() for token in range(len(tokenizer))]
    behind_reasoning = joined(*automata)
    for seed in range(20):
        text = walk(behind_reasoning, spelled, random.Random(seed), 12).decode()
        assert re.fullmatch(r'\{"a": [0-9]+\}', content(text) or ""), text


@pytest.mark.parametrize("name", ReasoningParserManager.list_registered())
@pytest.mark.parametrize("has_markers", [True, False], ids=["tokens", "text"])
def test_every_parser_sees_that_the_prompt_has_ended_reasoning(name, has_markers):
    """Whole answers and streams are content alone."""
    patch.apply(table.SERVING)
    tokenizer = tokenizer_of(has_markers)
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "?"}], model="m"
    )
    try:
        parser_class = ParserManager.get_parser(reasoning_parser_name=name)
        parser = parser_class(tokenizer).reasoning_parser
    except Exception:  # vLLM refuses it when the server starts
        return
    start = parser.reasoning_start_str or ""
    end = parser.reasoning_end_str
    if end is None:
        return
    for turn in (f"{start}So.{end}", f"{end}{start}So.{end}\n\nHe"):
        prompt = tokenizer.encode(f"There once was{turn}")
        whole = parser_class(tokenizer)
        whole.set_prompt_token_ids(prompt)
        assert whole.parse("Ida and Tom", request)[:2] == (None, "Ida and Tom")
        assert whole.count_reasoning_tokens(tokenizer.encode("Ida and Tom")) == 0
        stream, content = parser_class(tokenizer), ""
        for part in ("Ida", " and", " Tom"):
            arguments = (part, tokenizer.encode(part), request, prompt)
            message = stream.parse_delta(*arguments, finished=part == " Tom")
            assert message.reasoning is None
            content += message.content
        assert content == "Ida and Tom"


def test_structured_output_in_reasoning_begins_at_once():
    tokenizer = tokenizer_of(True)
    for within, found in ((True, None), (False, "reasoning")):
        config = engine_config("qwen3", enable_in_reasoning=within)
        grammar = reasoning_before([5], tokenizer, config)
        assert (grammar and grammar.kind) == found


# Engines: one whose tokenizer spells the marker, one for which it is a token

FLAGS = (
    "--structured-outputs-config",
    '{"reasoning_parser": "qwen3"}',
    "--chat-template",
    TEMPLATE,
)


@pytest.fixture(scope="module")
def spelling(engines):
    return engines(
        "demo",
        skip_tokenizer_init=False,
        structured_outputs_config={"reasoning_parser": "qwen3"},
    )


@pytest.fixture(scope="module")
def marking(engines, reference_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("marking") / "llada"
    shutil.copytree(
        reference_checkpoints / "llada-tiny-a", folder, copy_function=shutil.copyfile
    )
    tokenizer_of(True).save_pretrained(folder)
    return engines(
        folder,
        skip_tokenizer_init=False,
        structured_outputs_config={"reasoning_parser": "qwen3"},
    )


@pytest.fixture(params=["spelling", "marking"], scope="module")
def llm(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def reasoning_client(llm):
    return served(llm, "--served-model-name", "m", *FLAGS)


@pytest.fixture(scope="module")
def openai(reasoning_client):
    return openai_client(reasoning_client)


SHOWN: dict[str, Any] = {
    "thinking": ({}, True),
    "left out": ({"include_reasoning": False}, False),
    "off": (NO_THINKING, False),
}


@pytest.mark.parametrize("way", SHOWN)
def test_streams_have_reasoning_and_answer_apart(reasoning_client, way):
    fields, reasons = SHOWN[way]
    sampled = {"temperature": 1.0, "n": 2, "seed": 4, "stream": True}
    body = (
        {"model": "m", "messages": CHAT, "max_tokens": 64, "response_format": FORMAT}
        | fields
        | sampled
    )
    choices = choices_of(reasoning_client.post("/v1/chat/completions", json=body))
    assert len(choices) == 2
    for choice in choices:
        assert is_person(choice["content"])
        assert bool(choice["reasoning"]) == reasons


@pytest.mark.parametrize(
    ("way", "named", "stream"),
    [
        ("thinking", False, False),
        ("left out", True, False),
        ("off", False, True),
        ("thinking", True, True),
    ],
)
def test_calls_that_must_be_made_are_made(openai, way, named, stream):
    choice = (
        {"type": "function", "function": {"name": "look_up"}} if named else "required"
    )
    asked = {
        "model": "m",
        "messages": CHAT,
        "tools": TOOLS[:1],
        "tool_choice": choice,
        "max_tokens": 80,
    }
    answer = openai.chat.completions.create(
        **asked, stream=stream, extra_body=SHOWN[way][0]
    )
    messages = (
        [chunk.choices[0].delta for chunk in answer]
        if stream
        else [answer.choices[0].message]
    )
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    assert calls[0].name == "look_up"
    assert is_person("".join(call.arguments or "" for call in calls))


def test_responses_and_messages(openai, reasoning_client):
    schema = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}
    answer = openai.responses.create(
        model="m", input="Ida?", text=schema, max_output_tokens=64
    )
    assert answer.status == "completed"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert is_person(answer.output_text)
    tools = {
        "tools": [{"name": "look_up", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    }
    body = {"model": "m", "messages": CHAT, "max_tokens": 80} | tools
    answer = reasoning_client.post("/v1/messages", json=body).json()
    assert answer["stop_reason"] == "tool_use"
    assert is_person(json.dumps(answer["content"][-1]["input"]))


def test_texts_in_python_are_reasoning_marker_and_answer(llm):
    sampled = {"gen_length": 48, "temperature": 1.0, "n": 3, "seed": 1}
    for completion in matching(llm, PROMPT, "Ida|Tom", **sampled):
        reasoning, marker, answer = completion.text.partition("</think>")
        assert reasoning
        assert marker
        assert answer in ("Ida", "Tom")
        assert completion.finish_reason == "stop"
    assert_nothing_left(llm)


def test_a_template_may_give_the_marker(llm):
    tokenizer = llm.get_tokenizer()
    end = tokenizer.encode("</think>", add_special_tokens=False)
    template = [None] * 6 + end + [None] * 4
    (completion,) = matching(llm, PROMPT, "[0-9]{4}", response_template=template)
    assert re.fullmatch("[0-9]{4}", completion.text.partition("</think>")[2])


def test_there_is_room_for_the_marker_or_a_refusal(llm):
    with pytest.raises(
        ValueError, match="with the marker that ends reasoning before it"
    ) as refused:
        matching(llm, PROMPT, "[0-9]{4}", gen_length=1)
    fewest = int(re.search(r"has (\d+) tokens", str(refused.value))[1])
    assert fewest > 1
    (completion,) = matching(llm, PROMPT, "[0-9]{4}", gen_length=fewest)
    assert re.fullmatch(r"</think>[0-9]{4}", completion.text)


ENDED = {
    "prefilled": "<think>He said so.</think>",
    "empty": "<think>\n\n</think>\n\n",
    "again": "</think><think></think>",
}


@pytest.mark.parametrize("turn", ENDED)
@pytest.mark.parametrize("budget", [None, 0])
def test_reasoning_that_the_prompt_ends_is_not_begun_again(llm, turn, budget):
    prompt = f"Tom is 48.{ENDED[turn]}"
    settings = {"gen_length": 24, "thinking_token_budget": budget}
    (completion,) = matching(llm, prompt, "[0-9]{2}", **settings)
    assert re.fullmatch("[0-9]{2}", completion.text)


@pytest.mark.parametrize(
    "prompt",
    [
        "Tom is 48.",
        "</think>Tom is 48.<think>",
        "<think></think>48<|endoftext|>Tom",
        "</thin",
    ],
)
def test_reasoning_that_the_prompt_leaves_open_comes_first(spelling, prompt):
    (completion,) = matching(spelling, prompt, "[0-9]{2}", gen_length=24)
    assert re.fullmatch("(.|\n)*</think>[0-9]{2}", completion.text)


@pytest.mark.parametrize("turn", ENDED)
@whole_and_streamed
@pytest.mark.parametrize("regex", ["[0-9]{2}", None])
def test_a_continued_turn_that_has_ended_its_reasoning_has_none(
    reasoning_client, turn, stream, regex
):
    messages = [*CHAT, {"role": "assistant", "content": ENDED[turn]}]
    body = {
        "model": "m",
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    body |= {"max_tokens": 24, "stream": stream} | (
        {"structured_outputs": {"regex": regex}} if regex else {"min_tokens": 4}
    )
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = reasoning_client.post("/v1/chat/completions", json=body)
    (choice,) = choices_of(answer)
    assert re.fullmatch(regex or "(.|\n)+", choice["content"])
    assert not choice["reasoning"]
    last = chunks_of(answer.text)[-1] if stream else answer.json()
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("ended", [None, False, True])
@pytest.mark.parametrize("rendered", [False, True], ids=["raw", "rendered"])
def test_arguments_of_asynchronous_engines(spelling, ended, rendered):
    prompt = {"prompt_token_ids": spelling.get_tokenizer().encode(PROMPT)} | (
        {"type": "token"} if rendered else {}
    )
    params = DiffusionParams(
        structured_outputs=StructuredOutputsParams(regex="[0-9]{4}"), gen_length=24
    )

    async def answer():
        outputs = EngineInProcess(spelling).generate(
            prompt, params, "asked", reasoning_ended=ended
        )
        return [output async for output in outputs][-1].outputs[0]

    before = params.clone()
    text = asyncio.run(answer()).text
    assert re.fullmatch("[0-9]{4}" if ended else "(.|\n)*</think>[0-9]{4}", text)
    assert params == before


# Budgets


def reasoning_tokens(llm, token_ids) -> int:
    """How many tokens have text before the marker, or in all if there is none."""
    tokenizer = llm.get_tokenizer()
    lengths = [
        len(tokenizer.decode(token_ids[:count])) for count in range(len(token_ids) + 1)
    ]
    before = len(tokenizer.decode(token_ids).partition("</think>")[0])
    return sum(length < before for length in lengths)


@pytest.mark.parametrize("budget", [0, 1, 13])
@pytest.mark.parametrize("settings", [{}, {"threshold": 0.2, "block_length": 8}])
@pytest.mark.parametrize("regex", ["[0-9]{2}", None])
def test_reasoning_keeps_its_budget(llm, budget, settings, regex):
    structured = regex and StructuredOutputsParams(regex=regex)
    asked = {
        "gen_length": 48,
        "temperature": 1.0,
        "seed": 5,
        "n": 3,
        "ignore_eos": not regex,
    } | settings
    params = DiffusionParams(
        structured_outputs=structured, thinking_token_budget=budget, **asked
    )
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    for completion in output.outputs:
        assert reasoning_tokens(llm, completion.token_ids) <= budget
        assert re.fullmatch("(.|\n)*</think>" + (regex or "(.|\n)*"), completion.text)
        assert completion.finish_reason == ("stop" if regex else "length")
    assert params.thinking_token_budget == budget
    assert_nothing_left(llm)


@pytest.mark.parametrize("regex", ["[0-9]{2}", None])
def test_a_budget_that_is_not_used_up_changes_nothing(spelling, regex):
    texts = set()
    for budget in (None, 24, 31, 32, 9999):
        settings = {"gen_length": 32, "thinking_token_budget": budget}
        (completion,) = matching(spelling, PROMPT, regex, **settings)
        texts.add(completion.text)
    assert len(texts) == 1


@whole_and_streamed
def test_budgets_of_chats(reasoning_client, llm, stream):
    body = {
        "model": "m",
        "messages": CHAT,
        "max_tokens": 48,
        "min_tokens": 40,
        "thinking_token_budget": 5,
        "stream": stream,
    }
    answer = reasoning_client.post("/v1/chat/completions", json=body)
    (choice,) = choices_of(answer)
    spent = llm.get_tokenizer().encode(choice["reasoning"], add_special_tokens=False)
    assert len(spent) <= 5
    assert choice["content"]
    assert "</think>" not in choice["content"]


@pytest.fixture(scope="module")
def wide_clients(engines):
    """Contexts with room for the least budget of ``/v1/messages``; with a reasoning
    parser, and without.
    """
    settings = {"max_model_len": 1200, "skip_tokenizer_init": False}
    with_parser = engines(
        "demo", structured_outputs_config={"reasoning_parser": "qwen3"}, **settings
    )
    name = ("--served-model-name", "m")
    return served(with_parser, *name, *FLAGS), served(
        engines("demo", **settings), *name
    )


def test_budgets_of_messages(wide_clients):
    wide_client, without_parser = wide_clients
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"model": "m", "messages": CHAT, "max_tokens": 1100, "thinking": thinking}
    body["vllm_xargs"] = {"block_length": 1100, "threshold": 0.01}
    answer = wide_client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    for change in (
        {"max_tokens": 1024},
        {"thinking": thinking | {"budget_tokens": 1023}},
    ):
        refused = wide_client.post("/v1/messages", json=body | change)
        assert refused.status_code == 400
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert "budget_tokens" in refused.json()["error"]["message"]
    refused = without_parser.post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert "thinking.budget_tokens" in refused.json()["error"]["message"]
    assert (
        without_parser.post(
            "/v1/messages", json=body | {"thinking": {"type": "disabled"}}
        ).status_code
        == 200
    )


def test_budgets_that_nothing_can_keep_are_refused(demo):
    """Without a reasoning parser: unless the response is no longer, or has a text of
    its own.
    """
    for budget, structured, is_kept in (
        (31, None, False),
        (32, None, True),
        (0, "[0-9]{2}", True),
    ):
        settings = {"gen_length": 32, "thinking_token_budget": budget}
        if is_kept:
            assert matching(demo, PROMPT, structured, **settings)[0].text
            continue
        with pytest.raises(
            ValueError,
            match=r"thinking_token_budget=31 \(thinking.budget_tokens.*--reasoning-parser",
        ):
            matching(demo, PROMPT, structured, **settings)
