"""A server that is ended while it loads leaves no process behind."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

FORKING = """
import mmap, os, time
memory = mmap.mmap(-1, 1 << 28, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.write(bytes(1 << 28))
print("ready", flush=True)
while os.fork():
    pass
time.sleep(60)
"""
"""A process that forks all the time, as an engine that starts workers. What it has in memory makes a fork last."""
SERVER = f"""
import subprocess, sys, time
from dllm_engine.vllm_hooks.server.start import end_on_signals
end_on_signals()
subprocess.Popen([sys.executable, "-c", {FORKING!r}], stdout=subprocess.PIPE).stdout.readline()
print("loads", flush=True)
time.sleep(60)
"""


@pytest.fixture
def server():
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, start_new_session=True)
    yield process
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_an_engine_that_forks_while_its_server_ends_leaves_no_process(server):
    assert server.stdout.readline() == b"loads\n"
    server.terminate()
    assert server.wait(timeout=30) == 0
    assert not [process for process in psutil.process_iter() if session_of(process.pid) == server.pid]


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
