"""Requests over HTTP: what nobody asked for, what is refused, and that each is checked
once.
"""

import json
from typing import Any

import pytest

from dllm_engine.admission import admitted
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.request_options.sampling_params import DefaultLength, ResponseLimit
from dllm_engine.vllm_hooks import input_processor, patch, table
from tests.support.engines import assert_nothing_left
from tests.support.http_app import chunks_of, length_of, refusal

QUESTION = "Tom=48. Ida=07. Give: Ida, Tom"
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]})
COMPLETION: Any = ("/v1/completions", {"prompt": QUESTION})
RESPONSE = ("/v1/responses", {"input": QUESTION})
ENDPOINTS: dict[str, Any] = {
    "chat": CHAT,
    "completion": COMPLETION,
    "response": RESPONSE,
    "invoked chat": ("/invocations", CHAT[1]),
    "invoked completion": ("/invocations", COMPLETION[1]),
}


@pytest.fixture(params=ENDPOINTS)
def ask(request, client):
    path, body = ENDPOINTS[request.param]
    return lambda **fields: client.post(path, json={"model": "demo"} | body | fields)


def test_a_length_nobody_asked_for_is_the_checkpoints(ask):
    assert length_of(ask(ignore_eos=True)) == 32
    assert length_of(ask(ignore_eos=True, max_tokens=None)) == 32


@pytest.mark.parametrize(
    ("fields", "fragments"),
    [
        (
            {"block_length": 8},
            (
                "block_length belongs into vllm_xargs",
                '{"vllm_xargs": {"block_length": …}}',
            ),
        ),
        ({"threshold": None}, ("threshold belongs into vllm_xargs",)),
        ({"gen_length": 8}, ("gen_length", "max_tokens", "max_output_tokens")),
        ({"cache_method": "dual"}, ("cache_method is an option of the engine",)),
        ({"cfg_scale": 1.5}, ("cfg_scale", "not supported")),
        ({"presence_penalty": 1.0}, ("presence_penalty=1.0",)),
        ({"vllm_xargs": {"gen_length": 8}}, ("gen_length", "max_tokens")),
        (
            {"vllm_xargs": {"cache_method": "dual"}},
            ("cache_method is an option of the engine",),
        ),
        ({"vllm_xargs": {"steps": 33}}, ("steps=33", "1 … gen_length", "here 32")),
        ({"vllm_xargs": {"stepz": 3}}, ("stepz",)),
        ({"vllm_xargs": {"steps": 10**30}}, ("64",)),
        ({"vllm_xargs": {"factor": "Infinity"}}, ("factor",)),
        ({"temperature": 1e308}, ("temperature",)),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_by_name(ask, fields, fragments):
    """A stream too: with an error status, not with an error in a stream
    that has begun.
    """
    whole, streamed = (ask(**fields, stream=stream) for stream in (False, True))
    assert streamed.status_code == 400
    assert whole.json() == streamed.json()
    for fragment in fragments:
        assert fragment in refusal(whole)


of_chats_and_completions = pytest.mark.parametrize(
    "ask", ["chat", "completion"], indirect=True
)


@of_chats_and_completions
@pytest.mark.parametrize("asked", [{}, {"trace": True}, {"return_order": True}])
def test_figures_come_with_each_chunk_and_what_grows_with_the_whole_response(
    ask, asked
):
    fields: dict[str, Any] = {
        "ignore_eos": True,
        "max_tokens": 16,
        "vllm_xargs": {"block_length": 8} | asked,
    }
    (choice,) = ask(**fields).json()["choices"]
    whole = choice["diffusion"]
    assert ("trace" in whole, "committed_at" in whole) == (
        "trace" in asked,
        "return_order" in asked,
    )
    if "return_order" in asked:
        assert len(whole["committed_at"]) == len(whole["committed_logprobs"]) == 16
    chunks = chunks_of(ask(**fields, stream=True))
    first, last = (
        c["diffusion"] for chunk in chunks for c in chunk["choices"] if "diffusion" in c
    )
    assert (first["forward_passes"], last) == (8, whole)
    assert not {"trace", "committed_at"} & first.keys()


END = "1"
"""The end token of the demo model."""


def test_an_end_token_is_kept_out_by_a_bias(ask):
    free = length_of(ask())
    assert free < 32
    assert length_of(ask(logit_bias={})) == length_of(ask(logit_bias={END: 0})) == free
    assert length_of(ask(logit_bias={END: -100})) == 32
    assert length_of(ask(logit_bias={END: 100})) == 1


@of_chats_and_completions
def test_a_response_has_a_least_length(ask):
    for length in (1, 13, 31, 32):
        assert length_of(ask(logit_bias={END: 100}, min_tokens=length)) == min(
            length + 1, 32
        )
    assert "min_tokens must be less than or equal to max_tokens=32" in refusal(
        ask(min_tokens=33)
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 257}, "max_tokens=257"),
        ({"prompt_logprobs": 1}, "prompt_logprobs=1"),
        ({"use_beam_search": True, "n": 2, "temperature": 1.0}, "beam search"),
        ({"vllm_xargs": {"stream_granularity": "step"}}, "stream_granularity='step'"),
        ({"vllm_xargs": {"stream_granularity": "token"}}, "stream_granularity='token'"),
        ({"n": 2}, "n=2 needs a temperature above 0"),
        ({"n": 10**9, "temperature": 0.7}, "n"),
    ],
    ids=str,
)
@of_chats_and_completions
def test_what_these_cannot_serve_is_refused_by_name(ask, fields, named):
    assert named in refusal(ask(**fields))


BATCH = ("/v1/chat/completions/batch", {"messages": [CHAT[1]["messages"]]})
MESSAGE = ("/v1/messages", {"max_tokens": 8, "messages": CHAT[1]["messages"]})


@pytest.mark.parametrize(
    ("route", "fields", "fragment"),
    [
        (
            COMPLETION,
            {"prompt": ["a"] * 600, "n": 2},
            "1200 responses, more than the 1024",
        ),
        (
            COMPLETION,
            {"prompt": ["Hello!", "say <|mdm_mask|>"], "stream": True},
            "mask token",
        ),
        *[(COMPLETION, {"prompt": prompt}, "") for prompt in ([], [[]])],
        (CHAT, {"messages": []}, ""),
        (CHAT, {"messages": None}, "messages is None; give a list of messages"),
        *[(BATCH, {"messages": messages}, "") for messages in ([], [[]])],
        (BATCH, {"block_length": 8}, "block_length belongs into vllm_xargs"),
        (BATCH, {"stream": True}, "stream is not supported for a batch of chats"),
        (
            BATCH,
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools is not supported for a batch",
        ),
        (
            MESSAGE,
            {"min_tokens": 3},
            "min_tokens is a field of SamplingParams, /v1/completions",
        ),
        (
            MESSAGE,
            {"structured_outputs": {"regex": "a"}},
            "structured_outputs is not a field of /v1/messages",
        ),
        (
            RESPONSE,
            {"min_tokens": 3},
            "min_tokens is a field of SamplingParams, /v1/completions",
        ),
        (
            RESPONSE,
            {"vllm_xargs": {"min_tokens": 3}},
            "min_tokens is a field of SamplingParams, /v1/completions",
        ),
    ],
)
def test_what_one_route_cannot_serve_is_refused_as_a_whole(
    client, demo, route, fields, fragment
):
    path, body = route
    assert fragment in refusal(
        client.post(path, json={"model": "demo"} | body | fields)
    )
    assert_nothing_left(demo)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_question_about_the_mask_token_is_told_how_to_spell_it(
    client, demo, endpoint
):
    mask = demo.get_tokenizer().convert_ids_to_tokens(
        demo.model_config.hf_config.mask_token_id
    )
    path, body = ENDPOINTS[endpoint]

    def about(text):
        return client.post(
            path,
            json=json.loads(
                json.dumps({"model": "demo"} | body).replace(QUESTION, text)
            ),
        )

    refused = about(f"What does {mask} mean?")
    assert "spell its text in another way, for example with a space in it" in refusal(
        refused
    )
    assert about(f"What does {mask.replace('_', ' _')} mean?").status_code == 200


def test_each_is_checked_once_and_leaves_nothing(demo, ask, monkeypatch):
    checked = []
    monkeypatch.setattr(
        input_processor,
        "admitted",
        lambda *given: checked.append(given) or admitted(*given),
    )
    assert ask().status_code == 200
    assert len(checked) == 1
    processor = demo.llm_engine.output_processor
    assert not processor.request_states
    assert not processor.parent_requests
    assert_nothing_left(demo)


# A server's own limit


def test_lengths_above_a_servers_own_limit_are_refused_and_our_default_limits_nobody():
    from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

    def length(asked, stated):
        return get_max_tokens(512, asked, 100, {"max_tokens": stated}, stated)

    patch.apply(table.SERVING)
    for asked, given in ((400, 400), (None, 256), (10, 10)):
        assert length(asked, DefaultLength(256)) == given
    assert length(300, ResponseLimit(300)) == 300
    with pytest.raises(
        InvalidRequestError, match="max_tokens=301 is above this server's limit of 300"
    ):
        length(301, ResponseLimit(300))
    assert length(301, 300) == 300, "vLLM clips those of other models"


def test_a_number_too_long_to_read_is_refused_by_the_messages_api(client):
    body = b'{"model": "demo", "messages": [], "max_tokens": ' + b"9" * 5000 + b"}"
    sent_as = {"content-type": "application/json"}
    answer = client.post("/v1/messages", content=body, headers=sent_as)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"] == "There was an error parsing the body"


@pytest.mark.parametrize(
    ("ask", "change", "message"),
    [
        (COMPLETION, {"vllm_xargs": {"template": ["\ud800", 2]}}, "half a character"),
        (COMPLETION, {"suffix": "a\udfff"}, "half a character"),
        (MESSAGE, {"vllm_xargs": ["x"]}, "vllm_xargs is not an object"),
        (COMPLETION, {"suffix": 5}, "valid string"),
        (COMPLETION, {"suffix": "x", "max_tokens": []}, "valid integer"),
        (
            CHAT,
            {
                "logprobs": True,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "schema": {
                            "type": "object",
                            "properties": {"a": {"enum": [1, 2]}},
                            "required": [["a"]],
                        },
                    },
                },
            },
            "required",
        ),
    ],
)
def test_what_is_no_text_or_object_is_refused(client, ask, change, message):
    path, body = ask
    sent = json.dumps({"model": "demo", "max_tokens": 8, **body, **change})
    sent_as = {"content-type": "application/json"}
    assert message in refusal(client.post(path, content=sent, headers=sent_as))


def test_a_number_may_be_a_text_where_a_hole_is_filled(client):
    asked = {"model": "demo", "prompt": QUESTION, "suffix": " Tom", "max_tokens": "2"}
    assert client.post("/v1/completions", json=asked).status_code == 200
