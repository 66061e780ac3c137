"""Responses that a middleware changes once they are whole."""

from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


async def rewrite_json(
    app: ASGIApp,
    connection: tuple[Scope, Receive, Send],
    is_wanted: Callable[[int], bool],
    rewritten: Callable[[int, bytes], Any],
) -> None:
    """Call ``app``. Of a JSON response whose status ``is_wanted``, send what
    ``rewritten`` makes of status and body."""
    scope, receive, send = connection
    start: Message | None = None
    body = b""

    async def hold(message: Message) -> None:
        nonlocal start, body
        if message["type"] == "http.response.start" and is_wanted(message["status"]):
            kind = Headers(raw=message["headers"]).get("content-type", "")
            if kind.startswith("application/json"):
                start = message
                return
        if start is None:
            await send(message)
            return
        body += message.get("body", b"")
        if not message.get("more_body", False):
            status = start["status"]
            # The others describe the body.
            headers = {
                name: value
                for name, value in Headers(raw=start["headers"]).items()
                if not name.startswith("content-")
            }
            response = JSONResponse(rewritten(status, body), status, headers)
            await response(scope, receive, send)

    await app(scope, receive, hold)
