"""Shutdown of a server: every client gets an answer, and the exit status says whether the engine died.

vLLM's own server answers requests that come while it finishes others with status 500, and its health check with 200.
Requests that it cuts off end as if they were complete, or with an error that blames the engine. A second signal does
nothing. When its engine dies, it exits with status 0, as if somebody had stopped it.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import psutil
from vllm.entrypoints.launchers.launcher import terminate_if_errored
from vllm.exceptions import GenerationError, GracefulHTTPError
from vllm.logger import init_logger
from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError

from dllm_engine.structured_output.automata import stop_builds
from dllm_engine.vllm_hooks.patch import Original
from dllm_engine.vllm_hooks.server.bodies import Message, error_response
from dllm_engine.vllm_hooks.server.start import SIGNALS, end_now

logger = init_logger(f"vllm.{__name__}")

ENGINE_DIED = 1
"""Exit status of a server whose engine died."""
RETRY_AFTER_S = 5
LAST_BYTES_S = 5
"""Seconds that clients have to take their answers when no engine is left."""
STOPPING = "the server is shutting down; send the request again, to another server or later"
DIED = "the engine died, and the server ends; send the request again, to another server or later"


class ServerStopping(GracefulHTTPError, GenerationError):
    """Ends a request when the server is asked to stop. It has both base classes so that vLLM does not take it for a
    failure of its own and logs no traceback."""

    def __init__(self) -> None:
        super().__init__(STOPPING, HTTPStatus.SERVICE_UNAVAILABLE)
        self.status_code = HTTPStatus.SERVICE_UNAVAILABLE


class RefuseWhileShuttingDown:
    """ASGI middleware: once the application's ``state.refusal`` says why no request can be served any more, every route
    but /metrics answers 503 with that text. Every 503 says when to try again."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = getattr(scope["app"], "state", None)  # vLLM deletes it in the end

        async def send_with_hint(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
                hint = [(b"retry-after", str(RETRY_AFTER_S).encode())]
                hint += [(b"connection", b"close")] if getattr(state, "refusal", None) else []
                message["headers"] = [*message.get("headers", ()), *hint]
            await send(message)

        app = self.app
        if (reason := getattr(state, "refusal", None)) and scope["path"] != "/metrics":
            app = error_response(reason, HTTPStatus.SERVICE_UNAVAILABLE)
        await app(scope, receive, send_with_hint)


async def serve_gracefully(serve_http: Original, app: Any, *args: Any, **kwargs: Any) -> Awaitable[Any]:
    """vLLM's ``serve_http`` without the gaps. The awaitable that it returns is awaited after everything else."""
    engine = app.state.engine_client
    if engine is None:  # a server that only renders prompts
        return await serve_http(app, *args, **kwargs)
    shutdown = GracefulShutdown(app.state, engine)
    try:
        closing = await serve_http(app, *args, timeout_graceful_shutdown=LAST_BYTES_S, **kwargs)
    except psutil.Error:
        # vLLM asks for the command of a process that has the port. That may be a worker that ends at this moment.
        closing = app.state.server.shutdown()
    return closing if shutdown.was_asked_for or not engine.errored else _fail_after(closing)


async def _fail_after(closing: Awaitable[Any]) -> None:
    await closing
    logger.error("the engine died; the server ends with exit status %d", ENGINE_DIED)
    raise SystemExit(ENGINE_DIED)


class GracefulShutdown:
    """The shutdown of one server. It takes the place of the methods with which vLLM stops the engine and tells requests
    that it has died."""

    def __init__(self, state: Any, engine: Any) -> None:
        self.was_asked_for = False
        self._state, self._engine = state, engine  # vLLM deletes the application's reference to the state in the end
        self._loop = asyncio.get_running_loop()
        self._outputs = engine.output_processor
        self._stop, engine.shutdown = engine.shutdown, self.stop
        self._process_outputs, self._outputs.process_outputs = self._outputs.process_outputs, self.process_outputs
        self._propagate_error, self._outputs.propagate_error = self._outputs.propagate_error, self.propagate_error

    def stop(self, timeout: float | None = None) -> None:
        """Stop the engine. With a timeout in seconds, it finishes running requests first. vLLM calls this in a thread,
        and only when the server is asked to stop."""
        self.was_asked_for, self._state.refusal = True, STOPPING
        self._on_loop(self._end_at_next_signal)
        if self._engine.engine_core.resources.engine_manager is None:
            # The engines belong to the main process, which stops them after its API servers, of which this is one.
            deadline = time.monotonic() + (timeout or 0)
            while self._outputs.request_states and time.monotonic() < deadline:
                time.sleep(0.1)
        self._stop(timeout=timeout)
        self._on_loop(self.propagate_error, ServerStopping())

    def process_outputs(self, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Pass on the engine's outputs. A stopping engine aborts its requests, and vLLM would send what they have as a
        complete answer; here clients get an error."""
        if self.was_asked_for:
            aborted = [output for output in outputs if output.finish_reason is FinishReason.ABORT]
            for output in aborted:
                if (request := self._outputs.request_states.get(output.request_id)) is not None:
                    request.queue.put(ServerStopping())
            outputs = [output for output in outputs if output not in aborted]
        return self._process_outputs(outputs, *args, **kwargs)

    def propagate_error(self, error: Exception) -> None:
        """End all requests with an error: no engine is left."""
        if self.was_asked_for:
            error = ServerStopping()
        else:
            self._state.refusal = DIED
            if isinstance(error, EngineDeadError):
                error.args = (DIED,)  # clients see no stack trace
            # vLLM would look for it every five seconds.
            self._loop.call_soon(terminate_if_errored, self._state.server, self._engine)
        stop_builds(error)
        self._state.likelihoods.end(error)
        self._propagate_error(error)

    def _end_at_next_signal(self) -> None:
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._end_without_waiting, number)

    def _end_without_waiting(self, number: signal.Signals) -> None:
        self.propagate_error(ServerStopping())
        self._loop.call_later(0.2, end_now, number)  # time for the errors to be sent

    def _on_loop(self, act: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(act, *args)
