"""End of a server: its clients get an answer, and the exit status says whether its engine died."""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import psutil
from vllm.exceptions import GenerationError, GracefulHTTPError


class ServerStopping(GracefulHTTPError, GenerationError):
    """Ends a request when the server is asked to stop. It has both base classes so that vLLM does not take it for a
    failure of its own and logs no traceback."""

    def __init__(self) -> None:
        text = "the server is shutting down; send the request again, to another server or later"
        super().__init__(text, HTTPStatus.SERVICE_UNAVAILABLE)
        self.status_code = HTTPStatus.SERVICE_UNAVAILABLE


async def serve_and_tell(serve_http: Callable[..., Awaitable[Any]], app: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's ``serve_http``, which returns what is awaited last. It would leave the clients of a server that stops
    without an answer, and end with status 0, not 1, if its engine died, so that no supervisor would start it again."""
    engine, was_stopped, loop = app.state.engine_client, False, asyncio.get_running_loop()

    def stop(*args: Any, **kwargs: Any) -> None:  # in a thread
        nonlocal was_stopped
        was_stopped = True
        stop_engine(*args, **kwargs)
        for end in (engine.output_processor.propagate_error, likelihoods.end):
            loop.call_soon_threadsafe(end, ServerStopping())

    async def fail() -> None:
        await closing
        raise SystemExit(1)

    if engine is not None:  # a server may only render prompts
        stop_engine, engine.shutdown, likelihoods = engine.shutdown, stop, app.state.likelihoods
    try:
        closing = await serve_http(app, *args, **kwargs)
    except psutil.Error:
        # vLLM asks for the command of a process that has the port. That may be a worker that ends at this moment.
        closing = app.state.server.shutdown()
    return fail() if engine is not None and engine.errored and not was_stopped else closing
