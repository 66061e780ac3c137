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
"""What vLLM set before the server could act on it."""


def started_name(model: str) -> str:
    """The name under which the seconds of a start are remembered."""
    return f"dllm serve {model}"


def end_on_signals() -> None:
    """Let SIGTERM and Ctrl-C end this process, the main one of a server, until vLLM can
    act on them. vLLM would wait for the engine's process, which notes a signal and goes
    on loading."""
    _set_handlers()
    # vLLM forks the engine's process, except on a CPU, while an event loop runs. A
    # signal to the engine would wake that loop, which would take it for one to the
    # server.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _set_handlers() -> None:
    for number in SIGNALS:
        signal.signal(number, end_now)


def keep_handlers(setup_server: Original, args: Any, *rest: Any, **kwargs: Any) -> Any:
    """vLLM calls this right after it has set handlers of its own, long before a model
    is loaded. They raise an exception, which is lost or waits for the engine. One API
    server replaces ours when it listens."""
    _handlers_of_vllm.update({number: signal.getsignal(number) for number in SIGNALS})
    _set_handlers()
    return setup_server(args, *rest, **kwargs)


def restore_handlers(
    wait: Original, api_server_manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """The main process of several API servers calls this when their engines are loaded.
    It fails if a process does, which vLLM has then logged."""
    for number, handler in _handlers_of_vllm.items():
        signal.signal(number, handler)
    try:
        return wait(api_server_manager, *args, **kwargs)
    except RuntimeError:
        raise SystemExit(1) from None


def end_at_once(serve: Callable[[], None]) -> None:
    """Call vLLM's ``serve``, whose handler of SIGTERM raises an exception in the moment
    before ``keep_handlers``.
    """
    try:
        serve()
    except KeyboardInterrupt:
        end_now(signal.SIGTERM)


def end_now(number: int, frame: FrameType | None = None) -> None:
    """Signal handler: end this process and its children. The exit status is 130 after
    Ctrl-C, and 0 after SIGTERM, with which a supervisor stops a server."""
    interrupted = number == signal.SIGINT
    # Not `print`: the signal may have interrupted one.
    os.write(2, b"dllm: interrupted\n" if interrupted else b"dllm: stopped\n")
    for child in _suspended_children():
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(130 if interrupted else 0)


def _suspended_children() -> set[psutil.Process]:
    """All processes below this one, which start no others any more."""
    seen: set[psutil.Process] = set()
    suspended = set()
    while new := set(psutil.Process().children(recursive=True)) - seen:
        seen |= new
        for child in new:
            with suppress(psutil.NoSuchProcess):
                # Python's resource tracker ends by itself, and removes the others'
                # shared memory.
                if "multiprocessing.resource_tracker" not in " ".join(child.cmdline()):
                    child.suspend()
                    suspended.add(child)
    return suspended
