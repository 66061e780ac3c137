"""Request bodies that vLLM's request classes trip over are refused before they get there."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_FIELD = "structured_outputs"


class BodyCheck:
    """ASGI middleware: answers 400 where ``structured_outputs`` is neither null nor an object.

    vLLM looks into it before its type is checked, and would answer 500.
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
    # A field's name may be written with escapes.
    if _FIELD.encode() not in body and b"\\u" not in body:
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # vLLM says what is wrong with it
        return None
    given = fields.get(_FIELD) if isinstance(fields, dict) else None
    if given is None or isinstance(given, dict):
        return None
    from starlette.responses import JSONResponse
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    error = create_error_response(
        f"{_FIELD} is a {type(given).__name__}; structured output is not supported for diffusion models: leave it "
        f"unset",
        param=_FIELD,
    )
    return JSONResponse(error.model_dump(), status_code=error.error.code)
