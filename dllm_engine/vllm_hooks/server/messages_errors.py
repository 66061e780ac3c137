"""Errors of ``/v1/messages`` in that API's words. vLLM 0.32 uses OpenAI's, and 0.33
where a body is not valid.
"""

import json
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from dllm_engine.vllm_hooks.patch import Original

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def translate_type(translate_error_response: Original, response: Any) -> Response:
    """Errors that the route itself returns."""
    return _translated(translate_error_response(response))


def translate_refusals(init_exception_handler: Original, app: FastAPI) -> None:
    """Bodies are refused before the route is called."""
    before = dict(app.exception_handlers)
    init_exception_handler(app)
    for kind, handler in list(app.exception_handlers.items()):
        if handler is not before.get(kind):
            app.exception_handler(kind)(_translating(handler))


def _translating(handler: Any) -> Any:
    async def handle(request: Request, error: Exception) -> Response:
        response = await handler(request, error)
        return (
            _translated(response)
            if request.url.path.startswith("/v1/messages")
            else response
        )

    return handle


def _translated(response: Response) -> Response:
    status = response.status_code
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error = {
        "type": kind,
        "message": json.loads(bytes(response.body))["error"]["message"],
    }
    return JSONResponse({"type": "error", "error": error}, status, _kept(response))


def _kept(response: Response) -> dict[str, str]:
    """Headers that do not describe the body."""
    return {
        name: value
        for name, value in response.headers.items()
        if not name.startswith("content-")
    }
