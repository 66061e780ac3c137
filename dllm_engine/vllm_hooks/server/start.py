"""Start of a server: signals while the model loads."""

import os
import signal
from contextlib import suppress
from types import FrameType

import psutil


def end_on_signals() -> None:
    """Let SIGTERM and Ctrl-C end this process, the main one of a server, until vLLM's server listens and installs its
    own handlers. vLLM waits for the engine's process, which notes a signal and goes on loading."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_now)
    # vLLM forks the engine's process, except on a CPU, while an event loop runs. A signal to the engine would wake that
    # loop, which would take it for one to the server.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def end_now(number: int, frame: FrameType | None = None) -> None:
    """Signal handler: end this process and its children. The exit status is 130 after Ctrl-C, and 0 after SIGTERM, with
    which a supervisor stops a server."""
    interrupted = number == signal.SIGINT
    # Not `print`: the signal may have interrupted one.
    os.write(2, b"dllm: interrupted\n" if interrupted else b"dllm: stopped\n")
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            # Python's resource tracker ends by itself, and removes the others' shared memory.
            if "multiprocessing.resource_tracker" not in " ".join(child.cmdline()):
                child.kill()
    os._exit(130 if interrupted else 0)
