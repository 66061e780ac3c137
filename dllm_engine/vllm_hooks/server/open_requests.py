"""Open requests of a server. Each gets an answer, whether its own error, the server's
end or the engine's end ends it.
"""

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from contextvars import ContextVar
from functools import partial
from http import HTTPStatus
from typing import Any, NoReturn

from prometheus_client import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMError
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from dllm_engine.figures import ErrorReason
from dllm_engine.infill.http import Filling
from dllm_engine.vllm_hooks.server.error_forms import last_events, message_of, route_of

logger = init_logger(f"vllm.{__name__}")

RETRY_AFTER = "1"
"""Seconds after which a client may try again, on this or another server."""
_TELLING_SECONDS = 1
"""Time for requests to write the errors that end them, or to read the rest of a body.
"""
HTTP_ERRORS = Counter(
    "dllm_http_errors", "HTTP answers of status 400 and more, by status.", ["status"]
)
"""vLLM's counter has only 4xx and 5xx as a whole, and misses answers that are given
before it. When an engine starts, vLLM deletes metrics whose names begin with its
prefix.
"""
for status in ("400", "500", "503"):
    # Begin with 0, because ``rate`` misses the first value of a series.
    HTTP_ERRORS.labels(status)
_MOST_CHARACTERS = 400
"""Limit on the length of a reason in the log, in characters."""
_NUMBER = re.compile(rb'"sequence_number": ?([0-9]+)')


class OpenRequest:
    """One open request: an HTTP request that is answered in a ``task``, or a request of
    a file. The middleware writes the errors of HTTP requests: vLLM has no error form
    for some routes, and stops only tasks that wait for the engine."""

    def __init__(self, route: str, task: "asyncio.Task[Any] | None" = None) -> None:
        self.route = route
        self.name = os.urandom(8)
        """Name under which its prompts and ``n`` responses take turns with other
        requests.
        """
        self.leaves_length_open = False
        self.length_limit: int | None = None
        """Limit on the tokens of a response whose length is chosen."""
        self.carried: dict[str, bytes] = {}
        """Values for ``extra_args`` of its parameters."""
        self.filling: Filling | None = None
        """Holes whose lengths are to be chosen."""
        self.hole_sizes: list[int] | None = None
        """Tokens of each hole of a template that names them all."""
        self.stops: list[str] = []
        """Stop strings of editors' routes that are not in its body."""
        self.headers: dict[str, str] = {}
        """Headers of the answer."""
        self.latest: list[tuple[Any, Any] | None] = []
        """Parameters and last output of each prompt."""
        self.error: Exception | None = None
        """The error that ended it."""
        self._tasks = set() if task is None else {task}

    def outputs(
        self, outputs: AsyncGenerator[Any, None], params: Any
    ) -> AsyncGenerator[Any, None]:
        """The engine's outputs for the next prompt, up to one that failed."""
        place = len(self.latest)
        self.latest.append(None)
        return self._noted(outputs, params, place)

    async def _noted(
        self, outputs: AsyncGenerator[Any, None], params: Any, place: int
    ) -> AsyncGenerator[Any, None]:
        if self._tasks and (task := asyncio.current_task()) is not None:
            self._tasks.add(task)  # vLLM answers in another task.
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if (error := _failure(output)) is not None:
                        self._fail(error)
                    self.latest[place] = params, output
                    yield output
        except EngineDeadError:
            if self.error is None:
                raise
            # The client has got the reason. vLLM would log a traceback.
            raise asyncio.CancelledError from None

    def _fail(self, error: Exception) -> NoReturn:
        if not self._tasks:
            raise error
        self.end(error)
        raise asyncio.CancelledError

    def end(self, error: Exception) -> None:
        """End a request over HTTP with an error, unless it has one."""
        if self.error is None:
            self.error = error
        for task in self._tasks:
            task.cancel()


Rewrite = Callable[[bytes], Any]
"""Function that changes the content of a JSON response."""
Rewriter = Callable[[Scope, int], Rewrite | None]

open_request: ContextVar[OpenRequest | None] = ContextVar("open_request", default=None)
"""The open request of this context."""


def _failure(output: Any) -> GenerationError | None:
    """The reason why a request failed. vLLM would answer as if the response were
    complete, or would not give the reason."""
    for completion in output.outputs:
        reason = completion.finish_reason
        if isinstance(reason, ErrorReason):
            return GenerationError(reason.explanation)
        if reason == "abort":
            return RetryableRequestError(
                "the server ended the request before its response was complete; send "
                "it again"
            )
    return None


class OpenRequests:
    """Open requests of an application, and the reason why it takes no more."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._requests: dict[asyncio.Task[Any], OpenRequest] = {}

    def begin(self, route: str, task: "asyncio.Task[Any]") -> OpenRequest:
        request = self._requests[task] = OpenRequest(route, task)
        request.error = self.error
        return request

    def finish(self, task: "asyncio.Task[Any]") -> None:
        request = self._requests.pop(task)
        if request.filling is not None:
            request.filling.end()

    async def finished(self, seconds: float) -> None:
        """Wait until no request is open, for a limited time in seconds."""
        if self._requests:
            await asyncio.wait(self._requests, timeout=seconds)

    async def end(self, error: Exception) -> None:
        """End all requests with an error, also if they wait for the engine, a worker,
        an automaton, or the rest of their body. Take no more."""
        self.error = error
        for request in self._requests.values():
            request.end(error)
        await self.finished(_TELLING_SECONDS)


class Answers:
    """ASGI middleware that answers requests which end with an error, and requests that
    come after the end. ``rewriter`` gives, for the scope of a request and the status of
    its JSON response, the function that changes the content; None: it stays as it is.
    """

    def __init__(
        self, app: ASGIApp, requests: OpenRequests, rewriter: Rewriter | None = None
    ) -> None:
        self.app = app
        self.requests = requests
        self.rewriter = rewriter or (lambda scope, status: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/metrics"):
            await self.app(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        request = self.requests.begin(route_of(scope), task)
        answer = Answer(send, request, self.requests, partial(self.rewriter, scope))
        open_request.set(request)
        try:
            if request.error is None:
                await self.app(scope, receive, answer.send)
            else:
                await _read(receive)
        except asyncio.CancelledError:
            if request.error is None:
                raise
            task.uncancel()
        except VLLMError as error:  # from the rest of the body
            request.error = error
        except Exception as error:
            if not answer.has_begun:
                raise
            logger.exception("a response to %s has failed", request.route)
            request.error = error
        finally:
            self.requests.finish(task)
        if not answer.is_complete and request.error is not None:
            await answer.end(request.error, scope, receive)


async def _read(receive: Receive) -> None:
    """Read a body if it comes soon. With an unread body, the system would break the
    connection before the client has read its answer.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_TELLING_SECONDS):
            while (await receive()).get("more_body", False):
                pass


class Answer:
    """Progress of sending one response."""

    def __init__(
        self,
        send: Send,
        request: OpenRequest,
        requests: OpenRequests,
        rewriter: Callable[[int], Rewrite | None],
    ) -> None:
        self._send = send
        self._request = request
        self._requests = requests
        self._rewriter = rewriter
        self._start: Message = {}
        self._headers: Headers | None = None
        self._rewrite: Rewrite | None = None
        self._kept = b""
        """The body of a refusal or of a rewritten response."""
        self._last_part = b""
        self._is_replaced = False
        self.is_complete = False

    @property
    def has_begun(self) -> bool:
        return self._headers is not None

    async def send(self, message: Message) -> None:
        """Pass a message on, unless it is vLLM's failure because the request was ended."""
        if message["type"] == "http.response.start":
            self._is_replaced = (
                self._request.error is not None and message["status"] >= 500
            )
        if not self._is_replaced:
            await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begin(message)
            if self._rewrite is None:
                await self._send(message)
            return
        status, body = self._start["status"], message.get("body", b"")
        self._last_part = body or self._last_part
        if self._rewrite is not None or 400 <= status < 500:
            self._kept += body
        self.is_complete = not message.get("more_body", False)
        if self.is_complete and 400 <= status < 500 and self._kept:
            why = message_of(self._kept)[:_MOST_CHARACTERS]
            logger.info("refused %s: %d: %s", self._request.route, status, why)
        if self._rewrite is None:
            await self._send(message)
        elif self.is_complete:
            body = JSONResponse(self._rewrite(self._kept)).body
            MutableHeaders(scope=self._start)["content-length"] = str(len(body))
            await self._send(self._start)
            await self._send({"type": message["type"], "body": body})

    def _begin(self, message: Message) -> None:
        status, headers = message["status"], MutableHeaders(scope=message)
        headers.update(self._request.headers)
        if status >= HTTPStatus.BAD_REQUEST:
            HTTP_ERRORS.labels(status).inc()
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers.setdefault("retry-after", RETRY_AFTER)
        if self._requests.error is not None:
            # The connection would break with the server's end.
            headers["connection"] = "close"
        self._start, self._headers = message, headers
        if headers.get("content-type", "").startswith("application/json"):
            self._rewrite = self._rewriter(status)

    async def end(self, error: Exception, scope: Scope, receive: Receive) -> None:
        """Answer with the error. If a stream has begun, end the stream with the error."""
        from vllm.entrypoints.serve.exception_handling.error_response import (
            create_error_response,
        )

        body = create_error_response(error).model_dump()
        status = body["error"]["code"]
        if self._headers is None:
            await JSONResponse(body, status)(scope, receive, self._pass_on)
        elif self._headers.get("content-type", "").startswith("text/event-stream"):
            numbers = _NUMBER.findall(self._last_part)
            number = int(numbers[-1]) + 1 if numbers else 0
            events = last_events(route_of(scope), body["error"], number)
            await self._send(
                {
                    "type": "http.response.body",
                    "body": events.encode(),
                    "more_body": False,
                }
            )
