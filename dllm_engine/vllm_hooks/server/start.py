"""Start and end of a server: its address, signals while the model loads, and the exit status of a failed one."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from types import FrameType
from typing import Any

import psutil
from vllm.exceptions import GenerationError, GracefulHTTPError

INTERRUPTED, STOPPED, ENGINE_DIED = 130, 0, 1
"""Exit statuses after Ctrl-C, after SIGTERM, with which a supervisor stops a server, and where its engine died."""


def check_address(host: str, port: int) -> None:
    """Raise ``ValueError`` where a server could not listen on ``host`` (empty: all) and ``port`` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        where = f"--host {host} --port {port}" if host else f"--port {port}"
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"the server cannot listen on {where}: {reason}; choose another") from error


def end_on_signals() -> None:
    """Let SIGTERM and Ctrl-C end this process, the main one of a server, until vLLM's server listens and installs its
    own handlers. vLLM waits for the engine's process, which notes a signal and goes on loading."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_now)
    # vLLM forks the engine's process, except on a CPU, while an event loop runs. A signal to the engine would wake that
    # loop, which would take it for one to the server.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def end_now(number: int, frame: FrameType | None = None) -> None:
    """Signal handler: end this process and its children. The exit status says which signal it was."""
    interrupted = number == signal.SIGINT
    # Not `print`: the signal may have interrupted one.
    os.write(2, b"dllm: interrupted\n" if interrupted else b"dllm: stopped\n")
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            # Python's resource tracker ends by itself, and removes the others' shared memory.
            if "multiprocessing.resource_tracker" not in " ".join(child.cmdline()):
                child.kill()
    os._exit(INTERRUPTED if interrupted else STOPPED)


class ServerStopping(GracefulHTTPError, GenerationError):
    """Ends a request when the server is asked to stop. It has both base classes so that vLLM does not take it for a
    failure of its own and logs no traceback."""

    def __init__(self) -> None:
        text = "the server is shutting down; send the request again, to another server or later"
        super().__init__(text, HTTPStatus.SERVICE_UNAVAILABLE)
        self.status_code = HTTPStatus.SERVICE_UNAVAILABLE


async def serve_and_tell(serve_http: Callable[..., Awaitable[Any]], app: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's ``serve_http``, which returns what is awaited last. It would leave the clients of a server that stops
    without an answer, and end with status 0 if its engine died, so that a supervisor would not start it again."""
    engine, was_stopped, loop = app.state.engine_client, False, asyncio.get_running_loop()

    def stop(*args: Any, **kwargs: Any) -> None:  # in a thread
        nonlocal was_stopped
        was_stopped = True
        stop_engine(*args, **kwargs)
        loop.call_soon_threadsafe(engine.output_processor.propagate_error, ServerStopping())

    async def fail() -> None:
        await closing
        raise SystemExit(ENGINE_DIED)

    if engine is not None:  # a server may only render prompts
        stop_engine, engine.shutdown = engine.shutdown, stop
    try:
        closing = await serve_http(app, *args, **kwargs)
    except psutil.Error:
        # vLLM asks for the command of a process that has the port. That may be a worker that ends at this moment.
        closing = app.state.server.shutdown()
    return fail() if engine is not None and engine.errored and not was_stopped else closing
