"""Start of a server: an address that is not available is reported at once, and signals work while the model loads.

While vLLM loads a model, its main thread waits for the engine process, which notes a signal and goes on loading. So the
signal handler itself ends the server: it kills the child processes, removes their shared memory and exits.
"""

import errno
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from dllm_engine.vllm_hooks.patch import Original

INTERRUPTED, STOPPED = 130, 0
"""Exit statuses after Ctrl-C and after SIGTERM, with which a supervisor stops a server."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHARED_MEMORY = "/dev/shm/"


class AddressError(ValueError):
    """A server cannot listen on the address that it was given."""


def check_address(host: str, port: int) -> None:
    """Raise ``AddressError`` where a server could not listen on ``host`` (empty: all) and ``port`` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        raise address_error(error, host, port) from error


def address_error(error: Exception, host: str, port: int) -> AddressError:
    """Message about an error of a server's socket."""
    if isinstance(error, OverflowError):
        return AddressError(f"--port {port} is not from 0 to 65535")
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        where = f" on {host}" if host else ""
        return AddressError(
            f"port {port} is in use{where}; stop the program that listens there or choose another --port"
        )
    if number == errno.EACCES:
        return AddressError(f"port {port} needs the rights of root; choose a --port above 1023")
    return AddressError(
        f"--host {host} is not an address of this machine ({getattr(error, 'strerror', None) or error}); use 0.0.0.0 "
        "to listen on all of them or 127.0.0.1 for this machine alone"
    )


def name_address(setup_server: Original, args: Any, *rest: Any, **kwargs: Any) -> Any:
    """vLLM's ``setup_server`` binds the socket before the model is loaded; an error becomes one sentence."""
    try:
        made = setup_server(args, *rest, **kwargs)
    except (OSError, OverflowError) as error:
        if args.uds:
            raise
        raise SystemExit(f"dllm: error: {address_error(error, args.host or '', args.port)}") from error
    if signal.getsignal(signal.SIGINT) is end_now:
        signal.signal(signal.SIGTERM, end_now)  # vLLM has just replaced ours
    return made


def end_on_signals() -> None:
    """Let SIGTERM and Ctrl-C end this process, the main one of a server, at once, until vLLM's server listens and
    installs its own handlers."""
    for number in SIGNALS:
        signal.signal(number, end_now)
    # vLLM forks the engine's process, except on a CPU, while an event loop runs. A signal to the engine would wake that
    # loop, which would take it for one to the server.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def end_on_signals_while_loading() -> None:
    """``end_on_signals`` if vLLM is starting a server in this process; other uses of vLLM keep their handlers."""
    handler = signal.getsignal(signal.SIGTERM)
    if getattr(handler, "__qualname__", "") == "run_server.<locals>._interrupt_init":
        end_on_signals()


def end_now(number: int, frame: FrameType | None = None) -> None:
    """Signal handler: end this process and its children. The exit status says which signal it was."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    interrupted = number == signal.SIGINT
    # Not `print`: the signal may have interrupted one.
    os.write(2, b"dllm: interrupted\n" if interrupted else b"dllm: stopped\n")
    _end_children()
    os._exit(INTERRUPTED if interrupted else STOPPED)


def _end_children() -> None:
    """Kill all child processes, including Python's resource trackers, and remove their shared memory."""
    children: set[psutil.Process] = set()
    # Suspend them first: an engine might just be starting another worker. A process that forks stops only afterwards.
    while new := set(psutil.Process().children(recursive=True)) - children:
        for child in new:
            with suppress(psutil.NoSuchProcess):
                child.suspend()
        deadline = time.monotonic() + 3
        while any(_runs(child) for child in new) and time.monotonic() < deadline:
            time.sleep(0.001)
        children |= new
    segments = {path for child in children for path in shared_memory_of(child.pid)}
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=3)
    for path in segments:
        Path(path).unlink(missing_ok=True)


def _runs(process: psutil.Process) -> bool:
    """Return True if the process is neither suspended nor gone."""
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def shared_memory_of(pid: int) -> set[str]:
    """Files in shared memory that a process has open and that still have a name."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended, or there is no /proc
        return set()
    paths = {line.split(maxsplit=5)[-1] for line in lines if _SHARED_MEMORY in line}
    return {path for path in paths if path.startswith(_SHARED_MEMORY) and not path.endswith(" (deleted)")}
