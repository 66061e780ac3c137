"""Check of request bodies before vLLM parses them. It refuses a body if vLLM's request
classes would fail or ignore a part of it, and settles our fields.
"""

import asyncio
import json
import re
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from dllm_engine.editors.routes import OWN_BODIES
from dllm_engine.params import VLLM_OPTIONS, check_place
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.vllm_hooks.server.error_forms import route_of
from dllm_engine.vllm_hooks.server.open_requests import open_request
from dllm_engine.vllm_hooks.server.settling import settled_fields

MOST_BYTES = 16 << 20
"""Limit on the bytes of a body: 1,024 prompts of 16 KB each. It is parsed in part of a
second, and meanwhile no other request is answered.
"""

_MAY_BE_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Possible halves of a character (surrogates) in JSON, escaped or not. Two halves may
be a whole character.
"""
_OWN_FIELDS = ("/v1/systemone", *OWN_BODIES)
"""Routes with their own fields. Some of these have the same names as our options."""
_OWN_ERRORS = ("/v1/decisions", "/v1/systemone")
"""Routes that refuse an invalid text in their own form."""


class BodyCheck:
    """ASGI middleware. Without it, vLLM answers 500 if ``structured_outputs`` is not an
    object, and ignores unknown fields. ``Answers`` sends its errors to the client.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        try:
            body = await _read(Request(scope, receive))
            body, scope = _decompressed(body, scope)
            fields = _checked_fields(body, route_of(scope))
            if fields is not None:
                body = await _settled(body, fields, scope, receive)
        except ClientDisconnect:
            return
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return unread.pop() if unread else await receive()

        await self.app(scope, receive_again, send)


async def _read(request: Request) -> bytes:
    """The body. Raises ``GracefulHTTPError`` (413) if it is larger than supported: at
    once if its length is given, else when too many bytes have come. The server drops
    the rest."""
    length = request.headers.get("content-length", "")
    parts, num_bytes = [], int(length) if length.isdecimal() else 0
    if num_bytes <= MOST_BYTES:
        num_bytes = 0
        async for part in request.stream():
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > MOST_BYTES:
                break
    if num_bytes > MOST_BYTES:
        raise _too_large()
    return b"".join(parts)


def _too_large() -> GracefulHTTPError:
    return GracefulHTTPError(
        f"the body has over {MOST_BYTES} bytes ({MOST_BYTES >> 20} MiB), which is "
        f"the most; send its prompts in several requests",
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    )


def _decompressed(body: bytes, scope: Scope) -> tuple[bytes, Scope]:
    """The body without zstd compression, which TypeSafe's client uses without being
    asked, and the scope without the headers about it. Raises as ``_read`` if the
    decompressed body is too large.
    """
    headers = dict(scope["headers"])
    if headers.get(b"content-encoding", b"").strip().lower() != b"zstd":
        return body, scope
    import zstandard  # Only such clients need it.

    reader = zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=True)
    try:
        body = reader.read(MOST_BYTES + 1)
    except zstandard.ZstdError as error:
        raise InvalidRequestError(
            f"content-encoding: zstd, but the body is none: {error}"
        ) from None
    if len(body) > MOST_BYTES:
        raise _too_large()
    of_body = (b"content-encoding", b"content-length")
    kept = [pair for pair in scope["headers"] if pair[0] not in of_body]
    return body, {**scope, "headers": kept}


async def _settled(
    body: bytes, fields: dict[str, Any], scope: Scope, receive: Receive
) -> bytes:
    """The body that vLLM reads. Raises ``ClientDisconnect`` as soon as the client
    leaves: an automaton may take long to build."""
    current_request = open_request.get()
    assert current_request is not None, "Answers is in front"
    settling = asyncio.create_task(
        settled_fields(fields, route_of(scope), scope["app"].state, current_request)
    )
    await asyncio.sleep(0)  # Most bodies need nothing more.
    if not settling.done():
        leaving = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({settling, leaving}, return_when="FIRST_COMPLETED")
        finally:
            leaving.cancel()
            has_left = not settling.done()
            settling.cancel()
        if has_left:
            raise ClientDisconnect
    settled = settling.result()
    return body if settled is fields else json.dumps(settled).encode()


def _checked_fields(body: bytes, path: str) -> dict[str, Any] | None:
    """The fields of a body; None if it has none, or if vLLM reads it unchanged. Raises
    ``VLLMValidationError`` if it is refused.
    """
    try:
        fields = json.loads(body)
        if path not in _OWN_ERRORS and _MAY_BE_HALF.search(body):
            json.dumps(fields, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidRequestError(
            "the body has too many lists and objects within each other"
        ) from None
    except UnicodeEncodeError as error:
        around = error.object[max(0, error.start - 20) : error.end + 20]
        raise InvalidRequestError(
            f"the body has half a character, a surrogate, in {around!a}; leave it out"
        ) from None
    except ValueError:  # vLLM's error says what is wrong.
        return None
    # Clients of that protocol may send fields of their own.
    if not isinstance(fields, dict) or path in _OWN_FIELDS:
        return None
    if not isinstance(outputs := fields.get("structured_outputs"), dict | None):
        raise VLLMValidationError(
            f"structured_outputs is a {type(outputs).__name__}, not an object such as "
            f'{{"regex": "[a-z]+"}}',
            parameter="structured_outputs",
        )
    known = {"top_p", "top_k"}  # These are fields of bodies.
    if path == "/v1/decisions":
        known |= {"passes", "template"}
    elif not path.startswith("/v1/messages"):
        # Other routes have these fields, or keep unknown fields.
        known |= VLLM_OPTIONS
    elif ignored := [
        name
        for name in ("response_format", "structured_outputs", "suffix")
        if fields.get(name)
    ]:
        raise InvalidRequestError(
            f"{ignored[0]} is not a field of {path}; take output_config, or another "
            f"route"
        )
    if path != "/inference/v1/generate":
        check_place(fields.keys() - known)
        return fields
    params = fields.get("sampling_params")
    inside = params.keys() if isinstance(params, dict) else set()
    check_place((fields.keys() | inside) - known, "sampling_params", "extra_args")
    if "vllm_xargs" in fields:
        raise InvalidRequestError(
            f"vllm_xargs: {path} takes options in sampling_params.extra_args; move "
            f"them there"
        )
    return fields
