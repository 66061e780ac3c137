"""Refuses request bodies that vLLM's request classes fail at, or of which they would ignore parts.

``BodyCheck`` sees bodies before vLLM parses them; ``create_if_known`` sees vLLM's request objects, also those of
``vllm run-batch``.
"""

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm import envs
from vllm.exceptions import VLLMValidationError

from dllm_engine.decisions.http import settle_decision
from dllm_engine.infill.http import settle_template
from dllm_engine.params import VLLM_OPTIONS, check_place
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.vllm_hooks.patch import Original, is_ours

_FIELDS_OF_VLLM = {"top_p", "top_k"}
"""Request options that the body of a request has fields for."""
_MESSAGES_ROUTE = "/v1/messages"
"""The route that ignores fields it does not know. Others have ``VLLM_OPTIONS``, or their models keep such fields."""
_TOKENS_ROUTE = "/inference/v1/generate"
_DECISIONS_ROUTE = "/v1/decisions"


class BodyCheck:
    """ASGI middleware. vLLM answers 500 where ``structured_outputs`` is no object, and ignores unknown fields."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return unread.pop() if unread else await receive()

        await (_refusal(body, scope["path"].removeprefix(scope.get("root_path", ""))) or self.app)(
            scope, receive_again, send
        )


def _refusal(body: bytes, path: str) -> Any:
    """The response to a body that is refused; None for one that goes to vLLM."""
    try:
        fields = json.loads(body)
        if isinstance(fields, dict):
            _check_places(fields, path)
            if not isinstance(given := fields.get("structured_outputs"), dict | None):
                raise VLLMValidationError(
                    f'structured_outputs is a {type(given).__name__}, not an object such as {{"regex": "[a-z]+"}}',
                    parameter="structured_outputs",
                )
        return None
    except RecursionError:
        refused = InvalidRequestError("the body has too many lists and objects within each other")
    except VLLMValidationError as error:
        refused = error
    except ValueError:  # vLLM says what is wrong with it
        return None
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    response = create_error_response(refused)
    return JSONResponse(response.model_dump(), status_code=response.error.code)


def _check_places(fields: dict[str, Any], path: str) -> None:
    """Raise ``InvalidRequestError`` for options of ours where vLLM would ignore them."""
    own = fields.keys() - _FIELDS_OF_VLLM
    if path == _DECISIONS_ROUTE:
        own -= {"passes", "template"}
    if not path.startswith(_MESSAGES_ROUTE):
        own -= VLLM_OPTIONS
    if path != _TOKENS_ROUTE:
        check_place(own)
        return
    places = ("sampling_params", "extra_args")
    params = fields.get(places[0])
    check_place(own, *places)
    check_place(params.keys() - _FIELDS_OF_VLLM - VLLM_OPTIONS if isinstance(params, dict) else (), *places)
    if "vllm_xargs" in fields:
        raise InvalidRequestError(f"vllm_xargs: {path} takes options in {'.'.join(places)}; move them there")


async def create_if_known(create: Original, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse options of ours that are not in ``vllm_xargs``: vLLM ignores fields that it does not know."""
    if is_ours(self):
        extra = request.model_extra or {}
        check_place(extra)
        for name in ("stream", "tools"):
            if extra.get(name):  # of a batch of chats, of whose answers vLLM would return the last part only
                raise InvalidRequestError(f"{name} is not supported for a batch of chats; send one request for each")
        _check_num_responses(request)
        await settle_template(request, self)
        await settle_decision(request, self)
    return await create(self, request, *args, **kwargs)


def _check_num_responses(request: Any) -> None:
    """vLLM limits prompts and ``n``, but not their product; and it makes all of these requests at once."""
    prompts: Any = getattr(request, "prompt", None) or getattr(request, "messages", None)
    is_several = isinstance(prompts, list) and isinstance(next(iter(prompts), None), str | list)
    num_responses = (len(prompts) if is_several else 1) * (getattr(request, "n", None) or 1)
    if num_responses > (most := envs.VLLM_MAX_COMPLETION_PROMPTS):
        raise InvalidRequestError(
            f"prompts × n are {num_responses} responses, more than the {most} that a request may have; send several "
            "requests, or start the server with a higher VLLM_MAX_COMPLETION_PROMPTS"
        )


def leave_completion_length_open() -> None:
    """Give completions without ``max_tokens`` the default length of chat completions, instead of OpenAI's 16."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    CompletionRequest.model_fields["max_tokens"].default = None
