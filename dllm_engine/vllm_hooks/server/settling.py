"""Request fields beyond vLLM's, settled before vLLM answers the request: templates,
decisions, and open lengths.
"""

from typing import Any

from vllm import envs
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from dllm_engine.admission import open_length_rule
from dllm_engine.decisions.http import settle_decision
from dllm_engine.editors.completions import (
    is_at_cursor,
    settle_completion,
    temperature_of,
)
from dllm_engine.infill.http import LENGTHS, settle_template
from dllm_engine.options import EngineOptions
from dllm_engine.params import check_place
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.request_options.sampling import check_num_responses
from dllm_engine.text import shortened
from dllm_engine.vllm_hooks.input_processor import NO_BEAM_SEARCH
from dllm_engine.vllm_hooks.server.open_requests import OpenRequest

CHATS, BATCH = "/v1/chat/completions", "/v1/chat/completions/batch"
RESPONSES = "/v1/responses"
COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
_ROUTES: dict[str, tuple[str, Any]] = {
    CHATS: ("openai_serving_chat", ChatCompletionRequest),
    BATCH: ("openai_serving_chat_batch", BatchChatCompletionRequest),
    COMPLETIONS: ("openai_serving_completion", CompletionRequest),
    MESSAGES: ("anthropic_serving_messages", AnthropicMessagesRequest),
    RESPONSES: ("openai_serving_responses", ResponsesRequest),
}
"""For each route, the attribute of the application's state that answers it, and vLLM's
class of its bodies.
"""
_NUMBERS = {"max_tokens", "min_tokens", "n"}
"""Number fields that may be texts."""


async def settled_fields(
    fields: dict[str, Any], route: str, state: Any, current_request: OpenRequest
) -> dict[str, Any]:
    """The fields of a body that vLLM reads. Raises ``InvalidRequestError`` for a
    request that cannot be served.
    """
    if route == "/invocations":  # SageMaker's route, for bodies of two routes.
        route = CHATS if "messages" in fields else COMPLETIONS
    name, request_class = _ROUTES.get(route, ("", None))
    serving = getattr(state, name, None)
    if serving is None:  # Otherwise vLLM does not answer the route.
        return fields
    check_place(fields.keys() - request_class.model_fields.keys())
    _check_fields(fields, route)
    if route == RESPONSES:
        # vLLM checks its response, which repeats these fields and must not have null
        # there.
        fields = {
            name: value
            for name, value in fields.items()
            if value is not None or name not in ("background", "truncation")
        }
    if route == COMPLETIONS and fields.get("max_tokens") == -1:
        fields = {**fields, "max_tokens": None}  # no limit
    if route == COMPLETIONS and is_at_cursor(fields):
        # vLLM refuses an empty prompt, but our models can complete it.
        request = _read({**fields, "prompt": "a"}, request_class)
        if request is None:
            return fields
        numbers = {name: getattr(request, name) for name in fields.keys() & _NUMBERS}
        fields = {**fields, **numbers}
        fields = await settle_completion(fields, serving, current_request)
    _check_draws(fields, state)
    if (request := _read(fields, request_class)) is None:
        return fields
    if route == COMPLETIONS and fields.get("max_tokens") is None:
        request.max_tokens = None  # not OpenAI's default
    before = _values(request)
    await settle(request, serving, current_request)
    changed = {
        name: value
        for name, value in _values(request).items()
        if value is not before.get(name)
    }
    fields = fields | changed if changed else fields
    return _with_length(fields, route, state, current_request)


def _check_fields(fields: dict[str, Any], route: str) -> None:
    """Refuse what vLLM would answer without a word about it, or not at all."""
    if not isinstance(fields.get("vllm_xargs") or {}, dict):
        raise InvalidRequestError(
            "vllm_xargs is not an object; give request options in it"
        )
    messages = fields.get("messages", [])
    if route == CHATS and not isinstance(messages, list):
        raise InvalidRequestError(
            f"messages is {shortened(messages)}; give a list of messages"
        )
    _check_num_responses(fields)
    for name in ("stream", "tools"):
        # vLLM would return the last part only.
        if route == BATCH and fields.get(name):
            raise InvalidRequestError(
                f"{name} is not supported for a batch of chats; send one request for "
                f"each"
            )


def _with_length(
    fields: dict[str, Any], route: str, state: Any, current_request: OpenRequest
) -> dict[str, Any]:
    """The fields with a length that vLLM takes as it is meant."""
    if route == MESSAGES:
        if isinstance(length := fields.get("max_tokens"), int):
            longest = state.vllm_config.model_config.max_model_len
            fields = {**fields, "max_tokens": min(length, longest)}
        return fields
    fields = _without_limit(fields, state, current_request)
    if route == COMPLETIONS and fields.get("max_tokens") is None:
        # vLLM takes OpenAI's default of 16, which is not ours.
        current_request.leaves_length_open = True
        fields = {name: x for name, x in fields.items() if name != "max_tokens"}
    return fields


def _without_limit(
    fields: dict[str, Any], state: Any, current_request: OpenRequest
) -> dict[str, Any]:
    """The fields without the length, which is only a limit if the length is chosen.
    vLLM would refuse a limit that exceeds the context.
    """
    limit = next((fields[name] for name in LENGTHS if fields.get(name)), None)
    if type(limit) is not int or limit < 1 or current_request.filling is not None:
        return fields
    engine = EngineOptions.from_vllm_config(state.vllm_config)
    xargs, ignore_eos = fields.get("vllm_xargs") or {}, bool(fields.get("ignore_eos"))
    if open_length_rule(xargs, engine, ignore_eos=ignore_eos) is None:
        return fields
    current_request.length_limit = limit
    return {name: value for name, value in fields.items() if name not in LENGTHS}


def _read(fields: dict[str, Any], request_class: Any) -> Any:
    """The request object of a body; None if vLLM will refuse it."""
    try:
        return request_class.model_validate(fields)
    except Exception:
        return None


def _values(request: Any) -> dict[str, Any]:
    """Values of all fields. Some classes do not declare ``vllm_xargs``."""
    return vars(request) | (request.model_extra or {})


async def settle(request: Any, serving: Any, current_request: OpenRequest) -> None:
    """Settle a request object of vLLM. ``current_request`` carries values that JSON cannot."""
    if getattr(request, "use_beam_search", False):
        raise InvalidRequestError(NO_BEAM_SEARCH)
    if (
        getattr(request, "echo", False)
        and not request.logprobs
        and hasattr(request, "top_logprobs")
    ):
        request.top_logprobs = None  # vLLM would take them for those of the prompt.
    await settle_template(request, serving, current_request)
    await settle_decision(request, serving)
    xargs = getattr(request, "vllm_xargs", None) or {}
    current_request.carried = {
        name: x for name, x in xargs.items() if isinstance(x, bytes)
    }
    if current_request.carried:
        request.vllm_xargs = {
            name: x for name, x in xargs.items() if name not in current_request.carried
        }


def _check_num_responses(fields: dict[str, Any]) -> None:
    """Refuse too many responses. vLLM limits prompts and ``n``, but not their product,
    and it makes all of these requests at once.
    """
    prompts = fields.get("prompt") or fields.get("messages")
    num_responses = 1
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list):
        num_responses = len(prompts)
    if isinstance(n := fields.get("n"), int) and n > 0:
        num_responses *= n
    if num_responses > (limit := envs.VLLM_MAX_COMPLETION_PROMPTS):
        raise InvalidRequestError(
            f"prompts × n are {num_responses} responses, more than the {limit} that a "
            f"request may have; send several requests, or start the server with a "
            f"higher VLLM_MAX_COMPLETION_PROMPTS"
        )


def _check_draws(fields: dict[str, Any], state: Any) -> None:
    """Refuse several greedy responses. vLLM's error does not say what to do."""
    if isinstance(n := fields.get("n"), int) and n > 1:
        check_num_responses(n, temperature_of(fields, state.vllm_config.model_config))
