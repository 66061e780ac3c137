"""Programs that start at once: forks of a process of the test run that has imported
vLLM.

A fork goes on as a new interpreter would: it runs the program as ``__main__``, with its
own arguments, variables, folder, streams and session. Where the program starts others
with ``sys.executable``, as Ray does, they are forks too.

As a script: ``serve SOCKET PID`` is the server, until that process ends, and ``run
SOCKET ARGUMENT...`` stands for ``python ARGUMENT...``.
"""

import contextlib
import fcntl
import functools
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_MESSAGE = 1 << 17
FIRST_VARIABLE = "PRELOADED"
"""Stays first in memory in all forks, where setproctitle (vLLM's and Ray's) finds the
memory of a process's title.
"""


class Program:
    """``python ARGUMENT...`` in a fork; the part of ``subprocess.Popen`` that tests
    use.
    """

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: Any = None,
        stderr: Any = None,
        address: str | None = None,
    ) -> None:
        out = 1 if stdout is None else stdout.fileno()
        err = {None: 2, subprocess.STDOUT: out}.get(stderr) or stderr.fileno()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(address or str(preloaded_programs().parent / "socket"))
        message = [
            [str(a) for a in arguments],
            str(cwd or Path.cwd()),
            dict(os.environ if env is None else env),
        ]
        socket.send_fds(self._server, [json.dumps(message).encode()], [0, out, err])
        self.pid = int(self._server.recv(64))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a preloaded program", timeout or 0)
            self.returncode = int(self._server.recv(64) or -signal.SIGKILL)
            self._server.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def wait_until(
    condition: Callable[[], object],
    timeout: float,
    program: Any = None,
    log: Path | None = None,
) -> None:
    """Until ``condition`` holds, within ``timeout`` seconds and before ``program``
    ends, which writes ``log``.
    """
    end = time.monotonic() + timeout
    while not condition():
        is_late = time.monotonic() > end or (
            program is not None and program.poll() is not None
        )
        assert not is_late, log and log.read_text(errors="replace")[-4000:]
        time.sleep(0.1)  # a look takes time of the processor, which the program needs


_servers: list[subprocess.Popen[bytes]] = []
"""Their streams stay open."""


@functools.cache
def preloaded_programs() -> Path:
    """A folder for ``PATH`` with ``python``, ``dllm`` and ``vllm``."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = (
        Path(tempfile.gettempdir(), f"preloaded-{run}")
        if run
        else Path(tempfile.mkdtemp())
    )
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "bin").exists():
            _start_server(folder, os.getppid() if run else os.getpid())
    return folder / "bin"


def _start_server(folder: Path, run: int) -> None:
    """Fill ``folder``, for as long as the process ``run`` lasts."""
    address, programs = folder / "socket", folder / "bin"
    programs.mkdir()
    scripts = Path(sysconfig.get_path("scripts"))
    start_of = {
        "python": [],
        "python3": [],
        "dllm": [scripts / "dllm"],
        "vllm": [scripts / "vllm"],
    }
    for name, arguments in start_of.items():
        client = [sys.executable, "-S", "-E", __file__, "run", address, *arguments]
        (programs / name).write_text(
            f'#!/bin/sh\nexec {shlex.join(map(str, client))} "$@"\n'
        )
        (programs / name).chmod(0o755)
    environment = {
        FIRST_VARIABLE: "1",
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, __file__, "serve", str(address), str(run)]
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment
    )
    assert server.stdout is not None
    assert server.stdout.readline(), "the server of preloaded programs did not start"
    _servers.append(server)


def serve(address: str, run: int) -> list[str]:
    """Fork for each program until the process ``run`` ends. Returns in each fork, with
    the program's arguments.
    """
    run_ended = os.pidfd_open(run)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    programs: dict[int, tuple[socket.socket, int]] = {}  # client and pid, by pidfd
    while True:
        clients = [client for client, _ in programs.values()]
        watched: list[Any] = [run_ended, listener, *programs, *clients]
        ready, _, _ = select.select(watched, [], [])
        if run_ended in ready:
            shutil.rmtree(Path(address).parent)
            sys.exit()
        for pidfd, (client, pid) in list(programs.items()):
            if pidfd in ready:
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(BrokenPipeError):
                    client.send(str(os.waitstatus_to_exitcode(status)).encode())
                client.close()
                os.close(pidfd)
                del programs[pidfd]
            elif client in ready:  # it was killed
                os.killpg(pid, signal.SIGKILL)
        if listener in ready:
            client, _ = listener.accept()
            message, streams, _, _ = socket.recv_fds(client, MAX_MESSAGE, 3)
            pid = os.fork()
            if not pid:
                return _become(message, streams)
            for stream in streams:
                os.close(stream)
            client.send(str(pid).encode())
            programs[os.pidfd_open(pid)] = client, pid


def _become(message: bytes, streams: list[int]) -> list[str]:
    """Take over what belongs to a program; returns its arguments."""
    os.setsid()
    for stream, number in zip(streams, range(3), strict=True):
        os.dup2(stream, number)
    # Other clients' sockets as well: their ends would not be seen while copies are
    # open.
    os.closerange(3, 256)
    arguments, folder, variables = json.loads(message)
    os.chdir(folder)
    for name in os.environ.keys() - variables.keys() - {FIRST_VARIABLE}:
        del os.environ[name]
    os.environ.update(
        {
            name: value
            for name, value in variables.items()
            if os.environ.get(name) != value
        }
    )
    return arguments


def main() -> None:
    role, address, *arguments = sys.argv[1:]
    if role == "run":
        run(address, arguments)
    sys.path.pop(0)  # this file's folder
    importlib.import_module("tests.support.imported")
    first, *rest = serve(address, int(arguments[0]))
    sys.executable = str(Path(address).with_name("bin") / "python")
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, os.path.dirname(first))
        runpy.run_path(first, run_name="__main__")


def run(address: str, arguments: Sequence[str]) -> None:
    """Run a program, pass signals on to it, and end as it ends."""
    if (
        arguments[0] == "-u"
    ):  # as Ray starts its own processes, whose output goes to files
        arguments = arguments[1:]
    if arguments[0].startswith("-") and arguments[0] != "-m":
        os.execv(sys.executable, [sys.executable, *arguments])
    program = Program(arguments, address=address)
    # A terminal's Ctrl-C reaches the processes below as well.
    signal.signal(signal.SIGINT, lambda number, _: os.killpg(program.pid, number))
    signal.signal(signal.SIGTERM, lambda number, _: program.send_signal(number))
    status = program.wait()
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
