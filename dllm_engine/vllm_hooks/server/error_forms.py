"""Errors in the form of the route: Anthropic's for ``/v1/messages``, OpenAI's for the
others. vLLM 0.32 answers ``/v1/messages`` in OpenAI's form, and vLLM 0.33 does so if a
body is not valid.
"""

import json
import logging
from typing import Any

from starlette.types import Scope

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's names of errors, by HTTP status."""


def route_of(scope: Scope) -> str:
    """The path of a request below the server's root."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def is_anthropic(route: str) -> bool:
    """Return True for the routes of Anthropic's API."""
    return route.startswith("/v1/messages")


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """The body of an error."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def last_events(route: str, error: dict[str, Any], number: int) -> str:
    """The last events of a failed stream. ``error`` has OpenAI's fields.

    ``number``: number of the event, for ``/v1/responses``.
    """
    if is_anthropic(route):
        body = anthropic_error(error["code"], error["message"])
        return f"event: error\ndata: {json.dumps(body)}\n\n"
    if route.startswith("/v1/responses"):
        body = {
            "type": "error",
            "code": "server_error",
            "message": error["message"],
            "param": None,
            "sequence_number": number,
        }
        return f"event: error\ndata: {json.dumps(body)}\n\n"
    return f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n"


def as_anthropic(status: int, body: bytes) -> dict[str, Any]:
    """The body of an error of ``/v1/messages`` in Anthropic's form."""
    stated = json.loads(body)
    # When FastAPI cannot read a body, its error has no "error".
    message = stated["error"]["message"] if "error" in stated else stated["detail"]
    return anthropic_error(status, str(message))


def message_of(body: bytes) -> str:
    """The text of an error in OpenAI's, Anthropic's, Ollama's or FastAPI's form."""
    try:
        stated = json.loads(body)
        error = stated.get("error") or stated.get("detail")
    except (ValueError, AttributeError):
        error = body.decode(errors="replace")
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message).split())


def is_failure(record: logging.LogRecord) -> bool:
    """Logging filter. vLLM logs each refusal of ``/v1/messages`` with a traceback, as
    if the server had failed. ``Answer`` logs a line instead.
    """
    from vllm.entrypoints.serve.exception_handling.error_response import (
        create_error_response,
    )

    error = record.exc_info[1] if record.exc_info else None
    return (
        not isinstance(error, Exception)
        or create_error_response(error).error.code >= 500
    )
