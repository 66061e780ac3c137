"""A server whose processes are killed, or that is asked to stop, while it loads or answers."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from dllm_engine.demo import demo_model_path
from dllm_engine.vllm_hooks.server.start import shared_memory_of
from tests.support.preloaded import wait_until
from tests.support.server import START_TIMEOUT_S, Server, scrape

pytestmark = pytest.mark.slow

NUM_CLIENTS = 3
SECONDS = 60
"""Far above what it takes, far below a timeout of any client."""
JSON = {"Content-Type": "application/json"}
NEVER_ENDING = 1900
"""Tokens of a request that outlasts its test."""


class Watched:
    """A server, the processes below it, and what they hold in shared memory."""

    def __init__(self, program, *arguments, **options):
        # The cache makes for short steps, so that what is asked here takes effect soon.
        cache = ("--additional-config", '{"dllm": {"cache_method": "dual"}}')
        self.server = Server(program, *arguments, *cache, "--max-model-len", "2048", **options)
        self.processes, self.segments = set(), set()

    def look(self):
        """Remember what there is now, to be gone later."""
        below = psutil.Process(self.server.process.pid).children(recursive=True)
        self.processes |= set(below)
        self.segments |= {path for process in below for path in shared_memory_of(process.pid)}

    def process_called(self, name):
        return next((p for p in self.processes if p.is_running() and name in p.name()), None)

    def check_nothing_is_left(self):
        _, alive = psutil.wait_procs(self.processes, timeout=SECONDS)
        assert not alive
        assert not [path for path in self.segments if Path(path).exists()]

    def check_the_end(self):
        """Nothing is left, and the log of a server that was asked to stop reports no failure."""
        self.check_nothing_is_left()
        assert "EngineCore encountered an issue" not in self.server.tail()
        assert "Traceback" not in self.server.tail()


@pytest.fixture
def start(tmp_path):
    """Starts a server, which ends with the test."""
    started = []

    def run(*arguments, program="dllm", model="demo", **options):
        started.append(Watched(program, "serve", model, *arguments, log=tmp_path / "log", **options))
        return started[-1]

    yield run
    for watched in started:
        if watched.server.process.poll() is None:
            os.killpg(watched.server.process.pid, signal.SIGKILL)


def body(num_tokens, **fields):
    prompt = {"model": "demo", "prompt": "Reverse: Rome Tom Oslo", "max_tokens": num_tokens, "ignore_eos": True}
    return json.dumps(prompt | fields).encode()


def ask(server, num_tokens=8, path="/v1/completions"):
    """The answer; with a status of 0 where the connection broke."""
    try:
        if path == "/health":
            return httpx.get(server.url + path, timeout=120)
        return httpx.post(server.url + path, content=body(num_tokens), headers=JSON, timeout=120)
    except httpx.TransportError:
        return httpx.Response(0)


def stream(server, num_tokens):
    """The data of a streamed answer's events."""
    answer = httpx.post(
        server.url + "/v1/completions", content=body(num_tokens, stream=True), headers=JSON, timeout=120
    )
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line]


def assert_refused(answer):
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) > 0
    assert "shutting down" in answer.json()["error"]["message"]


def assert_ends_with_an_error(events):
    *_, error, done = events
    assert "shutting down" in json.loads(error)["error"]["message"]
    assert done == "[DONE]"


def idle_connection(server):
    client = httpx.Client()
    assert client.get(server.url + "/health", timeout=120).text == ""
    return client


def wait_until_running(server, number):
    """Together: if they never do, ask for more tokens."""
    wait_until(lambda: scrape(server.url)["vllm:num_requests_running"] >= number, 60)


# Two ranks: what is left waits in the middle of a step for the one that is gone.
@pytest.mark.parametrize(("name", "ranks"), [("EngineCore", "1"), ("Worker", "2")])
def test_clients_of_a_killed_process_get_errors_and_the_server_fails(start, name, ranks, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    watched = start("--tensor-parallel-size", ranks)
    server = watched.server
    server.wait_until_ready()
    with ThreadPoolExecutor() as clients:
        answers = [clients.submit(ask, server, NEVER_ENDING) for _ in range(NUM_CLIENTS)]
        wait_until_running(server, NUM_CLIENTS)
        watched.look()
        watched.process_called(name).kill()
        killed = time.monotonic()
        for answer in answers:
            assert answer.result().status_code in (500, 503)
            assert "the engine died" in answer.result().json()["error"]["message"]
        assert server.process.wait(SECONDS) == 1, server.tail()
    assert time.monotonic() - killed < SECONDS
    watched.check_nothing_is_left()


def test_a_server_that_drains_finishes_what_runs_refuses_what_comes_and_ends_at_the_second_signal(start):
    watched = start("--shutdown-timeout", "600")
    server = watched.server
    server.wait_until_ready()
    with ThreadPoolExecutor() as clients:
        finished = [clients.submit(ask, server, 240) for _ in range(NUM_CLIENTS)]
        endless = [clients.submit(stream, server, NEVER_ENDING), clients.submit(ask, server, NEVER_ENDING)]
        wait_until_running(server, len(finished) + len(endless))
        watched.look()
        idle = idle_connection(server)
        server.process.terminate()
        time.sleep(0.5)
        for path in ("/v1/completions", "/v1/chat/completions", "/health"):
            assert_refused(ask(server, path=path))
        assert scrape(server.url)["vllm:num_requests_running"] > 0
        assert [answer.result().status_code for answer in finished] == [200] * NUM_CLIENTS
        assert not any(answer.done() for answer in endless)
        server.process.terminate()
        assert server.process.wait(SECONDS) == 0, server.tail()
        assert_ends_with_an_error(endless[0].result())
        assert endless[1].result().status_code == 503
    idle.close()
    watched.check_the_end()


def test_clients_of_a_server_that_stops_at_once_read_why(start):
    watched = start()  # --shutdown-timeout is 0
    server = watched.server
    server.wait_until_ready()
    with ThreadPoolExecutor() as clients:
        streamed = clients.submit(stream, server, NEVER_ENDING)
        answers = [clients.submit(ask, server, NEVER_ENDING) for _ in range(NUM_CLIENTS)]
        wait_until_running(server, NUM_CLIENTS + 1)
        watched.look()
        idle = idle_connection(server)
        stopped = time.monotonic()
        server.process.terminate()
        for answer in answers:
            assert_refused(answer.result())
        assert_ends_with_an_error(streamed.result())
        assert server.process.wait(SECONDS) == 0, server.tail()
    assert time.monotonic() - stopped < SECONDS
    idle.close()
    watched.check_the_end()


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

    def seen():
        watched.look()
        return watched.process_called(name)

    wait_until(seen, START_TIMEOUT_S, server.process, server.log)
    if number == signal.SIGINT:
        os.killpg(server.process.pid, number)  # a terminal sends it to all
    else:
        server.process.send_signal(number)
    assert server.process.wait(SECONDS) == status, server.tail()
    assert server.tail().splitlines()[-1] == said
    assert "leaked" not in server.tail()
    watched.check_the_end()
