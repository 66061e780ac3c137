"""A server whose processes are killed, or that is asked to stop, while it loads or answers."""

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.support.preloaded import wait_until
from tests.support.server import START_TIMEOUT_S, Server, scrape

pytestmark = pytest.mark.slow

NUM_CLIENTS = 3
SECONDS = 60
"""Far above what it takes, far below a timeout of any client."""


class Watched(Server):
    def __init__(self, *arguments, log):
        # The cache makes for short steps, so that what is asked here takes effect soon.
        cache = ("--additional-config", '{"dllm": {"cache_method": "dual"}}')
        super().__init__("dllm", "serve", "demo", *arguments, *cache, "--max-model-len", "2048", log=log)
        self.processes, self.clients = set(), ThreadPoolExecutor()

    def process_called(self, name):
        """A process below the server; what is there now is to be gone at the end."""
        self.processes |= set(psutil.Process(self.process.pid).children(recursive=True))
        return next((p for p in self.processes if p.is_running() and name in p.name()), None)

    def ask(self) -> "Future[httpx.Response]":
        """An answer to come, to a request that outlasts its test; with a status of 0 where the connection breaks."""
        body = {"model": "demo", "prompt": "Reverse: Rome Tom Oslo", "max_tokens": 1900, "ignore_eos": True}

        def answer():
            try:
                return httpx.post(self.url + "/v1/completions", json=body, timeout=120)
            except httpx.TransportError:
                return httpx.Response(0)

        return self.clients.submit(answer)

    def wait_until_running(self, number):
        """Together: if they never do, ask for more tokens."""
        wait_until(lambda: scrape(self.url)["vllm:num_requests_running"] >= number, 60)
        self.process_called("")

    def check_the_end(self, status):
        assert self.process.wait(SECONDS) == status, self.tail()
        _, alive = psutil.wait_procs(self.processes, timeout=SECONDS)
        assert not alive


@pytest.fixture
def start(tmp_path):
    started = []

    def run(*arguments):
        started.append(Watched(*arguments, log=tmp_path / "log"))
        return started[-1]

    yield run
    for watched in started:
        if watched.process.poll() is None:
            os.killpg(watched.process.pid, signal.SIGKILL)
        watched.clients.shutdown()


# Two ranks: what is left waits in the middle of a step for the one that is gone.
@pytest.mark.parametrize(("name", "ranks"), [("EngineCore", "1"), ("Worker", "2")])
def test_clients_of_a_killed_process_get_errors_and_the_server_fails(start, name, ranks):
    watched = start("--tensor-parallel-size", ranks)
    watched.wait_until_ready()
    answers = [watched.ask() for _ in range(NUM_CLIENTS)]
    watched.wait_until_running(NUM_CLIENTS)
    watched.process_called(name).kill()
    for answer in answers:
        assert answer.result().status_code in (0, 500, 503)
    watched.check_the_end(1)


def test_engines_and_workers_end_with_a_server_that_is_killed(start):
    watched = start("--tensor-parallel-size", "2")
    watched.wait_until_ready()
    assert watched.process_called("EngineCore")
    watched.process.kill()
    watched.check_the_end(-signal.SIGKILL)


def test_ctrl_c_ends_a_server_that_loads(start):
    watched = start()
    wait_until(lambda: watched.process_called("Worker"), START_TIMEOUT_S, watched.process, watched.log)
    os.killpg(watched.process.pid, signal.SIGINT)  # a terminal sends it to all
    watched.check_the_end(130)
    assert "dllm: interrupted" in watched.tail()


def test_a_server_that_is_stopped_ends_well(start):
    watched = start()
    watched.wait_until_ready()
    answer = watched.ask()
    watched.wait_until_running(1)
    watched.process.terminate()
    assert answer.result(timeout=SECONDS).status_code == 503
    watched.check_the_end(0)
