"""End of a server: its clients get an answer, and the exit status says whether its
engine died.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from multiprocessing import connection
from typing import Any

import psutil
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.exceptions import GenerationError, GracefulHTTPError

from dllm_engine.vllm_hooks.patch import Original
from dllm_engine.vllm_hooks.server.start import end_now

RETRY_AFTER = "1"
"""Seconds after which a client may ask again, here or another server."""
_TELLING_SECONDS = 1
"""For requests to write the errors that the engine's end gives them, before they are
cancelled.
"""
_CLOSING_SECONDS = 3
"""For connections to close. A client that does not read its answer would
keep one open.
"""


class ServerStopping(GracefulHTTPError, GenerationError):
    """Ends a request when the server is asked to stop. It has both base classes so that
    vLLM does not take it for a failure of its own and logs no traceback."""

    def __init__(self) -> None:
        text = (
            "the server is shutting down; send the request again, to another server or "
            "later"
        )
        super().__init__(text, HTTPStatus.SERVICE_UNAVAILABLE)
        self.status_code = HTTPStatus.SERVICE_UNAVAILABLE


class EngineDied(GracefulHTTPError):
    """Ends a request that waits for an engine that has died."""

    def __init__(self) -> None:
        text = "the engine has died; the log says why, and the server ends"
        super().__init__(text, HTTPStatus.INTERNAL_SERVER_ERROR)


class OpenRequests:
    """Requests that an application is answering, and why it takes no more."""

    def __init__(self) -> None:
        self.error: GracefulHTTPError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)

    def discard(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)

    async def finished(self, seconds: float) -> None:
        """Until no request is open, for so many seconds at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def end(
        self, propagate_error: Callable[[Exception], None], error: Exception
    ) -> None:
        """End those that run in the engine with an error, and then the others, whatever
        they wait for: a worker, an automaton, or the rest of their own body."""
        propagate_error(error)
        await self.finished(_TELLING_SECONDS)
        for task in self._tasks:
            task.cancel()


class RequestsEnd:
    """ASGI middleware. It answers requests that come, wait or fail when the server
    ends.
    """

    def __init__(self, app: ASGIApp, requests: OpenRequests) -> None:
        self.app = app
        self.requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/metrics"):
            await self.app(scope, receive, send)
            return
        answer = Answer(send, self.requests)
        task = asyncio.current_task()
        assert task is not None
        self.requests.add(task)
        try:
            if self.requests.error is None:
                await self.app(scope, receive, answer.send)
        except asyncio.CancelledError:
            if self.requests.error is None:
                raise
            task.uncancel()
        finally:
            self.requests.discard(task)
        if not answer.is_complete and self.requests.error is not None:
            await answer.end(self.requests.error, scope, receive)


class Answer:
    """What has been sent of one response."""

    def __init__(self, send: Send, requests: OpenRequests) -> None:
        self._send = send
        self._requests = requests
        self._headers: Headers | None = None
        self._is_replaced = False
        self.is_complete = False

    async def send(self, message: Message) -> None:
        """Pass a message on, but no failure of the server's own while it ends."""
        if message["type"] == "http.response.start":
            self._is_replaced = (
                self._requests.error is not None and message["status"] >= 500
            )
            if message["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
                MutableHeaders(scope=message).setdefault("retry-after", RETRY_AFTER)
        if self._is_replaced:
            return
        if message["type"] == "http.response.start":
            self._headers = Headers(raw=message["headers"])
        self.is_complete = message["type"] == "http.response.body" and not message.get(
            "more_body", False
        )
        await self._send(message)

    async def end(
        self, error: GracefulHTTPError, scope: Scope, receive: Receive
    ) -> None:
        """Answer with the error, or end the stream that has begun with it."""
        from vllm.entrypoints.serve.exception_handling.error_response import (
            create_error_response,
        )

        body = create_error_response(error).model_dump()
        if self._headers is None:
            headers = (
                {"retry-after": RETRY_AFTER}
                if error.http_status == HTTPStatus.SERVICE_UNAVAILABLE
                else None
            )
            await JSONResponse(body, error.http_status, headers)(
                scope, receive, self._send
            )
        elif self._headers.get("content-type", "").startswith("text/event-stream"):
            # The form that clients of all routes know: OpenAI's read `error`,
            # Anthropic's the event's name and `type`.
            event = (
                f"event: error\ndata: {json.dumps({'type': 'error', **body})}\n\ndata: "
                f"[DONE]\n\n"
            )
            await self._send(
                {
                    "type": "http.response.body",
                    "body": event.encode(),
                    "more_body": False,
                }
            )


async def serve_and_tell(
    serve_http: Callable[..., Awaitable[Any]], app: Any, *args: Any, **kwargs: Any
) -> Any:
    """vLLM's ``serve_http``, which returns what is awaited last. It would stop the
    engine first, leave the clients of a server that stops without an answer, and end
    with status 0, not 1, if its engine died, so that no supervisor would start it
    again."""
    engine = app.state.engine_client
    if engine is None:  # a server may only render prompts
        return await serve_http(app, *args, **kwargs)
    loop = asyncio.get_running_loop()
    requests: OpenRequests = app.state.open_requests
    stop_engine = engine.shutdown
    propagate_error = engine.output_processor.propagate_error
    endings = set()

    def stop(timeout: float | None = None) -> None:  # in a thread
        if not app.state.server.started:
            end_now(signal.SIGTERM)  # it has no clients yet
        requests.error = requests.error or ServerStopping()
        seconds = timeout or 0
        end = time.monotonic() + seconds
        asyncio.run_coroutine_threadsafe(drain(seconds), loop).result()
        stop_engine(timeout=max(0, end - time.monotonic()))

    async def drain(seconds: float) -> None:
        await requests.finished(seconds - min(_TELLING_SECONDS, seconds / 2))
        await requests.end(propagate_error, ServerStopping())

    def propagate_death(error: Exception) -> None:
        if requests.error is None:
            requests.error = EngineDied()
            ending = loop.create_task(requests.end(propagate_error, error))
            endings.add(ending)
            ending.add_done_callback(endings.discard)

    async def fail() -> None:
        await closing
        raise SystemExit(1)

    engine.shutdown = stop
    engine.output_processor.propagate_error = propagate_death
    kwargs.setdefault("timeout_graceful_shutdown", _CLOSING_SECONDS)
    try:
        closing = await serve_http(app, *args, **kwargs)
    except psutil.Error:
        # vLLM asks for the command of a process that has the port. That may be a worker
        # that ends at this moment.
        closing = app.state.server.shutdown()
    finally:
        engine.shutdown = stop_engine  # vLLM calls it once more
    return (
        fail()
        if engine.errored and not isinstance(requests.error, ServerStopping)
        else closing
    )


def watch_processes(monitor: Original, self: Any) -> None:
    """Wait for the end of an engine's process. vLLM waits until its pipe is closed,
    which the engine's own workers hold open for seconds more."""
    watched = {
        os.pidfd_open(process.pid): process
        for process in self.processes
        if process.is_alive()
    }
    ended = len(watched) < len(self.processes)
    while not ended and not self.manager_stopped.is_set():
        ended = bool(connection.wait(watched, timeout=1))
    if not self.manager_stopped.is_set():
        self.failed_proc_name = next(
            (process.name for process in self.processes if process.exitcode), None
        )
    for descriptor in watched:
        os.close(descriptor)
    self.shutdown()
