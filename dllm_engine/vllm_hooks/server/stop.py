"""End of a server: clients get an answer, and the exit status says whether the engine
died.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from multiprocessing import connection
from typing import Any

import psutil
from vllm.exceptions import GracefulHTTPError

from dllm_engine.playground import ROUTE as PLAYGROUND
from dllm_engine.quiet import remember_seconds
from dllm_engine.vllm_hooks.patch import Original
from dllm_engine.vllm_hooks.server.open_requests import OpenRequests
from dllm_engine.vllm_hooks.server.start import end_now, started_name

logger = logging.getLogger(f"vllm.{__name__}")

_TELLING_SECONDS = 1
"""Time in which a drain ends requests with an error."""
_CLOSING_SECONDS = 3
"""Time for connections to close. A client that does not read its answer would keep one
open.
"""

_TAKING_SECONDS = 0.1
"""Time to answer connections that the system has accepted."""
_ENDING_SECONDS = 3
"""Time for an idle engine to end. It frees its memory piece by piece, which takes
longer on a busy machine. Then it is killed.
"""


class ServerStopping(GracefulHTTPError):
    """Ends a request when the server is asked to stop."""

    def __init__(self) -> None:
        text = (
            "the server is shutting down; send the request again, to another server or "
            "later"
        )
        super().__init__(text, HTTPStatus.SERVICE_UNAVAILABLE)


class EngineDied(GracefulHTTPError):
    """Ends a request that waits for an engine that has died."""

    def __init__(self) -> None:
        text = "the engine has died; the log says why, and the server ends"
        super().__init__(text, HTTPStatus.INTERNAL_SERVER_ERROR)


async def serve_and_tell(
    serve_http: Callable[..., Awaitable[Any]], app: Any, sock: Any, **kwargs: Any
) -> Any:
    """Call vLLM's ``serve_http``, which returns an awaitable. Alone, it would stop the
    engine first and leave clients without an answer. If the engine died, it would end
    with status 0, not 1, so that no supervisor would start the server again."""
    engine = app.state.engine_client
    if engine is None:  # A server may only render prompts.
        return await serve_http(app, sock, **kwargs)
    loop = asyncio.get_running_loop()
    requests: OpenRequests = app.state.open_requests
    stop_engine = engine.shutdown
    propagate_error = engine.output_processor.propagate_error
    endings = set()

    def stop(timeout: float | None = None) -> None:  # in a thread
        server = app.state.server
        if not server.started:
            end_now(signal.SIGTERM)  # It has no clients yet.
        requests.error = requests.error or ServerStopping()
        asyncio.run_coroutine_threadsafe(drain(timeout or 0), loop).result()
        # Wait even if the server must stop at once: a killed engine leaves memory
        # behind.
        stop_engine(timeout=_ENDING_SECONDS)
        loop.call_soon_threadsafe(close_connections, server.server_state.connections)

    async def drain(seconds: float) -> None:
        await requests.finished(seconds - min(_TELLING_SECONDS, seconds / 2))
        await requests.end(ServerStopping())
        if engine.output_handler is not None:
            engine.output_handler.cancel()  # It would log that the engine is gone.
        if sock is not None and kwargs.get("peer_loads") is None:
            # New connections wait and are then refused. Engine and workers have the
            # socket too, so the system would accept more connections and break them at
            # the end.
            sock.listen(0)
            await asyncio.sleep(_TAKING_SECONDS)
            sock.shutdown(socket.SHUT_RDWR)

    def close_connections(connections: set[Any]) -> None:
        """Close connections that wait for a request, before vLLM looks for processes
        that use the port.
        """
        for open_connection in list(connections):
            open_connection.shutdown()

    def propagate_death(error: Exception) -> None:
        if requests.error is None:
            requests.error = EngineDied()
            ending = loop.create_task(requests.end(requests.error))
            endings.add(ending)
            ending.add_done_callback(lambda ending: propagate_error(error))

    async def fail() -> None:
        await closing
        raise SystemExit(1)

    if sock is not None:
        sock.listen()  # A reader of the address may connect at once.
        _tell_address(app, sock)
    engine.shutdown = stop
    engine.output_processor.propagate_error = propagate_death
    kwargs.setdefault("timeout_graceful_shutdown", _CLOSING_SECONDS)
    try:
        closing = await serve_http(app, sock, **kwargs)
    except psutil.Error:
        # vLLM reads the command of a process that has the port. That may be a worker
        # that ends at this moment.
        closing = app.state.server.shutdown()
    finally:
        engine.shutdown = stop_engine  # vLLM calls it once more.
    return (
        fail()
        if engine.errored and not isinstance(requests.error, ServerStopping)
        else closing
    )


def _tell_address(app: Any, sock: socket.socket) -> None:
    """Log the address of a server and of its playground, and store the seconds of the
    start for the next start in a terminal."""
    args, address = app.state.args, sock.getsockname()
    seconds = time.time() - psutil.Process().create_time()
    if sys.stdout.isatty():  # A user has waited for it.
        remember_seconds(started_name(args.model), seconds)
    if sock.family == socket.AF_UNIX:
        logger.info("The server listens on %s, after %.0f s", address, seconds)
        return
    host = "localhost" if address[0] in ("0.0.0.0", "::") else address[0]
    scheme = "https" if args.ssl_certfile else "http"
    url = f"{scheme}://{host}:{address[1]}{args.root_path or ''}"
    has_page = any(getattr(route, "path", "") == PLAYGROUND for route in app.routes)
    page = f"; playground: {url}{PLAYGROUND}" if has_page else ""
    logger.info("The server listens on %s/v1, after %.0f s%s", url, seconds, page)


def watch_processes(monitor: Original, self: Any) -> None:
    """Wait for the end of an engine's process. vLLM waits until its pipe is closed, but
    the engine's workers hold the pipe open for some seconds more."""
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
