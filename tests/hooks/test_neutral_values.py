"""Fields of a request that say what leaving them out says: its default, null, nothing
in a list or an object.
"""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

from tests.support.http_app import served

CHAT = [{"role": "user", "content": "Hi"}]
ROUTES: dict[str, Any] = {
    "/v1/completions": (CompletionRequest, {"prompt": "Hi", "max_tokens": 1}),
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {"messages": CHAT, "max_tokens": 1},
    ),
    "/v1/chat/completions/batch": (
        BatchChatCompletionRequest,
        {"messages": [CHAT], "max_tokens": 1},
    ),
    "/v1/responses": (ResponsesRequest, {"input": "Hi", "max_output_tokens": 1}),
    "/v1/messages": (AnthropicMessagesRequest, {"messages": CHAT, "max_tokens": 1}),
    "/inference/v1/generate": (
        GenerateRequest,
        {"token_ids": [5], "sampling_params": {"max_tokens": 1}},
    ),
}
OFF = {
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1,
    "min_p": 0,
    "top_k": -1,
    "top_p": 1,
    "n": 1,
    "min_tokens": 0,
    "logit_bias": {},
    "bad_words": [],
    "stop": [],
    "stop_token_ids": [],
}
"""Numbers and the like that turn an option off."""
REFUSED_BY_VLLM: list[Any] = [
    ("allowed_token_ids", []),
    ("tools", []),
]
"""By its own rules for every model, although the type is right."""


def neutral_values(path):
    """(field, value) of the fields of a route's body; those whose type vLLM refuses are
    left out.
    """
    request, body = ROUTES[path]
    values = []
    for name, field in request.model_fields.items():
        kind = str(field.annotation)
        default = (
            None
            if field.is_required()
            else field.get_default(call_default_factory=True)
        )
        default = TypeAdapter(Any).dump_python(default, mode="json")
        choices = [
            None,
            default,
            *([{}] * ("dict" in kind)),
            *([[]] * ("list" in kind)),
        ]
        values += [(name, value) for value in choices if name not in body]
    return [
        each
        for each in [*values, *OFF.items()]
        if each not in REFUSED_BY_VLLM and is_valid(path, *each)
    ]


def is_valid(path, name, value):
    request, body = ROUTES[path]
    try:
        request.model_validate({"model": "demo"} | body | {name: value})
    except ValidationError:
        return False
    return name in request.model_fields


@pytest.mark.parametrize("path", ROUTES)
def test_neutral_values_are_served(demo, path):
    _, body = ROUTES[path]
    client = served(demo, "--served-model-name", "demo", "--enable-scale-out")
    values = neutral_values(path)
    assert len(values) > 15
    for name, value in values:
        answer = client.post(path, json={"model": "demo"} | body | {name: value})
        assert answer.status_code == 200, f"{name}={value!r}: {answer.text}"
