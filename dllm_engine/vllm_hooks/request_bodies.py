"""Request bodies that vLLM's request classes trip over, or ignore parts of, are refused.

``BodyCheck`` sees bodies before vLLM parses them, the functions behind it see vLLM's request objects.
"""

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dllm_engine.params import check_place

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_FIELD = "structured_outputs"
_DEEPEST = 200
"""Objects and lists within each other; Python's parser gives up below a thousand, depending on who called it."""
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


class BodyCheck:
    """ASGI middleware: answers 400 to bodies for which vLLM would answer 500.

    Those are the ones where ``structured_outputs`` is neither null nor an object, which vLLM looks into before its type
    is checked, and where lists and objects are nested so deeply that they cannot be parsed.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body, last = bytearray(), await receive()
        while last["type"] == "http.request":
            body += last.get("body", b"")
            if not last.get("more_body", False):
                break
            last = await receive()
        if last["type"] == "http.request":
            if (refusal := _refusal(bytes(body))) is not None:
                await refusal(scope, receive, send)
                return
            last = {"type": "http.request", "body": bytes(body), "more_body": False}
        passed_on = False

        async def receive_again() -> Message:
            nonlocal passed_on
            if passed_on:
                return await receive()
            passed_on = True
            return last

        await self.app(scope, receive_again, send)


def _refusal(body: bytes) -> Any:
    """The response to a body that cannot be taken; None where vLLM is to have it."""
    if _nesting(body) > _DEEPEST:
        return _bad_request(f"the body has more than {_DEEPEST} lists and objects within each other", None)
    # A field's name may be written with escapes.
    if _FIELD.encode() not in body and b"\\u" not in body:
        return None
    try:
        fields = json.loads(body)
    except ValueError:  # vLLM says what is wrong with it
        return None
    given = fields.get(_FIELD) if isinstance(fields, dict) else None
    if given is None or isinstance(given, dict):
        return None
    return _bad_request(
        f"{_FIELD} is a {type(given).__name__}; structured output is not supported for diffusion models: leave it "
        f"unset",
        _FIELD,
    )


def _nesting(body: bytes) -> int:
    """How deeply the lists and objects of a JSON text are nested; not more than there are."""
    if (count := body.count(b"[") + body.count(b"{")) <= _DEEPEST:
        return count
    depth = deepest = 0
    for match in _BRACKETS.finditer(body):
        first = match[0][:1]
        if first in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif first in b"]}":
            depth -= 1
    return deepest


def _bad_request(message: str, field: str | None) -> Any:
    from starlette.responses import JSONResponse
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    error = create_error_response(message, param=field)
    return JSONResponse(error.model_dump(), status_code=error.error.code)


def checked_fields(create: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """vLLM ignores fields that it does not know."""

    async def create_if_known(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.model_config, "is_dllm_engine", False):
            check_place(request.model_extra or ())
        return await create(self, request, *args, **kwargs)

    return create_if_known


def leave_completion_length_open() -> None:
    """Where a body states no ``max_tokens``, vLLM puts OpenAI's 16 into it before it is parsed.

    Left open, it gets the default of a chat completion.
    """
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    CompletionRequest.model_fields["max_tokens"].default = None
