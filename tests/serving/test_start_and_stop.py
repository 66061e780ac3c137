"""A server whose processes are killed, or that is asked to stop, while it loads or answers."""

import json
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import psutil
import pytest

from dllm_engine.demo import demo_model_path
from tests.support.preloaded import wait_until
from tests.support.server import START_TIMEOUT_S, Server, scrape

pytestmark = pytest.mark.slow

NUM_CLIENTS = 3
SECONDS = 60
"""Far above what it takes, far below a timeout of any client."""
NEVER_ENDING = 1900
"""Tokens of a request that outlasts its test."""


class Watched:
    """A server, its clients, and the processes below it."""

    def __init__(self, program, *arguments, **options):
        # The cache makes for short steps, so that what is asked here takes effect soon.
        cache = ("--additional-config", '{"dllm": {"cache_method": "dual"}}')
        self.server = Server(program, *arguments, *cache, "--max-model-len", "2048", **options)
        self.processes = set()
        self.clients = ThreadPoolExecutor()

    def process_called(self, name):
        """A process below the server; what is there now is to be gone at the end."""
        self.processes |= set(psutil.Process(self.server.process.pid).children(recursive=True))
        return next((p for p in self.processes if p.is_running() and name in p.name()), None)

    def ask(self, num_tokens=NEVER_ENDING, path="/v1/completions", **fields) -> "Future[httpx.Response]":
        """An answer to come; with a status of 0 where the connection breaks."""
        body = {"model": "demo", "prompt": "Reverse: Rome Tom Oslo", "max_tokens": num_tokens, "ignore_eos": True}

        def answer():
            try:
                return httpx.post(self.server.url + path, json=body | fields, timeout=120)
            except httpx.TransportError:
                return httpx.Response(0)

        return self.clients.submit(answer)

    def wait_until_running(self, number):
        """Together: if they never do, ask for more tokens."""
        wait_until(lambda: scrape(self.server.url)["vllm:num_requests_running"] >= number, 60)
        self.process_called("")

    def check_the_end(self, status):
        """Nothing is left, and the log of a server that was asked to stop reports no failure."""
        assert self.server.process.wait(SECONDS) == status, self.server.tail()
        _, alive = psutil.wait_procs(self.processes, timeout=SECONDS)
        assert not alive
        if status != 1:
            assert "EngineCore encountered an issue" not in self.server.tail()
            assert "Traceback" not in self.server.tail()


@pytest.fixture
def start(tmp_path):
    """Starts a server, which ends with the test."""
    started = []

    def run(*arguments, program="dllm", model="demo"):
        started.append(Watched(program, "serve", model, *arguments, log=tmp_path / "log"))
        return started[-1]

    yield run
    for watched in started:
        if watched.server.process.poll() is None:
            os.killpg(watched.server.process.pid, signal.SIGKILL)
        watched.clients.shutdown()


def assert_refused(answer):
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) > 0
    assert "shutting down" in answer.json()["error"]["message"]


def assert_ends_with_an_error(answer):
    *_, error, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert "shutting down" in json.loads(error)["error"]["message"]
    assert done == "[DONE]"


# Two ranks: what is left waits in the middle of a step for the one that is gone.
@pytest.mark.parametrize(("name", "ranks"), [("EngineCore", "1"), ("Worker", "2")])
def test_clients_of_a_killed_process_get_errors_and_the_server_fails(start, name, ranks, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    watched = start("--tensor-parallel-size", ranks)
    watched.server.wait_until_ready()
    answers = [watched.ask() for _ in range(NUM_CLIENTS)]
    watched.wait_until_running(NUM_CLIENTS)
    watched.process_called(name).kill()
    for answer in answers:
        assert answer.result().status_code in (500, 503)
        assert "the engine died" in answer.result().json()["error"]["message"]
    watched.check_the_end(1)


def test_engines_and_workers_end_with_a_server_that_is_killed(start):
    watched = start("--tensor-parallel-size", "2")
    watched.server.wait_until_ready()
    assert watched.process_called("EngineCore")
    watched.server.process.kill()
    watched.check_the_end(-signal.SIGKILL)


def test_a_server_that_drains_finishes_what_runs_refuses_what_comes_and_ends_at_the_second_signal(start):
    watched = start("--shutdown-timeout", "600")
    server = watched.server
    server.wait_until_ready()
    finished = [watched.ask(240) for _ in range(NUM_CLIENTS)]
    streamed, endless = watched.ask(stream=True), watched.ask()
    watched.wait_until_running(NUM_CLIENTS + 2)
    with httpx.Client() as idle:
        assert idle.get(server.url + "/health", timeout=120).text == ""
        server.process.terminate()
        time.sleep(0.5)
        for path in ("/v1/completions", "/v1/chat/completions", "/health"):
            assert_refused(watched.ask(path=path).result())
        assert scrape(server.url)["vllm:num_requests_running"] > 0
        assert [answer.result().status_code for answer in finished] == [200] * NUM_CLIENTS
        assert not streamed.done()
        server.process.terminate()
        assert_ends_with_an_error(streamed.result())
        assert endless.result().status_code == 503
        watched.check_the_end(0)


def test_clients_of_a_server_that_stops_at_once_read_why(start):
    watched = start()  # --shutdown-timeout is 0
    watched.server.wait_until_ready()
    streamed, *answers = watched.ask(stream=True), watched.ask(), watched.ask()
    watched.wait_until_running(3)
    watched.server.process.terminate()
    for answer in answers:
        assert_refused(answer.result())
    assert_ends_with_an_error(streamed.result())
    watched.check_the_end(0)


@pytest.mark.parametrize(
    ("program", "model", "number", "name", "status", "said"),
    [
        ("vllm", demo_model_path(), signal.SIGTERM, "EngineCore", 0, "dllm: stopped"),
        ("dllm", "demo", signal.SIGINT, "Worker", 130, "dllm: interrupted"),
    ],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_signal_ends_a_server_that_loads(start, program, model, number, name, status, said):
    watched = start(program=program, model=model)
    server = watched.server
    wait_until(lambda: watched.process_called(name), START_TIMEOUT_S, server.process, server.log)
    if number == signal.SIGINT:
        os.killpg(server.process.pid, number)  # a terminal sends it to all
    else:
        server.process.send_signal(number)
    watched.check_the_end(status)
    assert said in server.tail()
