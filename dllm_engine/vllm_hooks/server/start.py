"""Start of a server: signals while the model loads."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import psutil

from dllm_engine.vllm_hooks.patch import Original

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_handlers_of_vllm: dict[int, Any] = {}
"""Handlers of vLLM, by signal, until the server can act on signals."""


def started_name(model: str) -> str:
    """The name under which the seconds of a start are stored."""
    return f"dllm serve {model}"


def end_on_signals() -> None:
    """Let SIGTERM and Ctrl-C end this process, the main process of a server, until vLLM
    can act on them. vLLM would wait for the engine's process, which notes a signal but
    goes on loading."""
    _set_handlers()
    # Except on a CPU, vLLM forks the engine's process while an event loop runs. A
    # signal to the engine would wake that loop, as if it were for the server.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _set_handlers() -> None:
    for number in SIGNALS:
        signal.signal(number, end_now)


def keep_handlers(setup_server: Original, args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Keep our handlers. vLLM calls this right after it has set its handlers, long
    before a model is loaded. These raise an exception, which is lost or waits for the
    engine. A single API server replaces our handlers when it listens."""
    _handlers_of_vllm.update({number: signal.getsignal(number) for number in SIGNALS})
    _set_handlers()
    return setup_server(args, *rest, **kwargs)


def restore_handlers(
    wait: Original, api_server_manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """Set vLLM's handlers again. The main process of several API servers calls this
    when their engines are loaded. It fails if a process fails, which vLLM has then
    logged."""
    for number, handler in _handlers_of_vllm.items():
        signal.signal(number, handler)
    try:
        return wait(api_server_manager, *args, **kwargs)
    except RuntimeError:
        raise SystemExit(1) from None


def end_at_once(serve: Callable[[], None]) -> None:
    """Call vLLM's ``serve`` and end at once on SIGTERM. In the moment before
    ``keep_handlers``, vLLM's handler raises an exception.
    """
    try:
        serve()
    except KeyboardInterrupt:
        end_now(signal.SIGTERM)


def end_now(number: int, frame: FrameType | None = None) -> None:
    """Signal handler: end this process and its children. The exit status is 130 after
    Ctrl-C, and 0 after SIGTERM, which supervisors send to stop a server."""
    interrupted = number == signal.SIGINT
    # Not `print`: the signal may have interrupted one.
    os.write(2, b"dllm: interrupted\n" if interrupted else b"dllm: stopped\n")
    for child in _suspended_children():
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(130 if interrupted else 0)


def _suspended_children() -> set[psutil.Process]:
    """All processes below this one. They are suspended, so that they start no others."""
    seen: set[psutil.Process] = set()
    suspended = set()
    while new := set(psutil.Process().children(recursive=True)) - seen:
        seen |= new
        for child in new:
            with suppress(psutil.NoSuchProcess):
                # Python's resource tracker ends by itself, and removes the shared
                # memory of the others.
                if "multiprocessing.resource_tracker" not in " ".join(child.cmdline()):
                    child.suspend()
                    suspended.add(child)
    return suspended
