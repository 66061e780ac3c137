"""A server whose processes are killed, or that is asked to stop, while it loads or
answers.
"""

import json
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.support.preloaded import wait_until
from tests.support.processes import BUILDER, children_of
from tests.support.server import START_TIMEOUT_S, Server, scrape

pytestmark = pytest.mark.slow

NUM_CLIENTS = 3
LONG = {"prompt": "Reverse: Rome Tom Oslo", "max_tokens": 1900, "ignore_eos": True}
STRUCTURED = {
    "prompt": "Reverse: Rome",
    "max_tokens": 32,
    "structured_outputs": {"regex": "(a|b)*a(a|b){15}"},
}
"""Its automaton has 65,536 states, so that its build is there for seconds."""
DECISION = {
    "prompt": "Reverse: Rome",
    "fields": {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{2}$"}},
    },
}
SECONDS = 60
"""Far above what it takes, far below a timeout of any client."""


class Watched(Server):
    def __init__(self, *arguments, **options):
        # The cache makes for short steps, so that what is asked here takes effect soon.
        options_of_ours = {"cache_method": "dual", "max_automaton_states": 1 << 17}
        additional = json.dumps({"dllm": options_of_ours})
        super().__init__(
            "dllm",
            "serve",
            "demo",
            *arguments,
            "--additional-config",
            additional,
            "--max-model-len",
            "2048",
            **options,
        )
        self.processes, self.clients = set(), ThreadPoolExecutor(16)

    def process_called(self, name):
        """A process below the server; what is there now is to be gone at the end."""
        server = psutil.Process(self.process.pid)
        self.processes.update(children_of(server))
        return next(iter(children_of(server, name)), None)

    def ask(self, route="/v1/completions", **asked) -> "Future[httpx.Response]":
        """An answer to come, to a request that outlasts its test; with a status of 0
        where the connection breaks.
        """
        body = {"model": "demo"} | (asked or LONG)

        def answer():
            try:
                return httpx.post(self.url + route, json=body, timeout=120)
            except httpx.TransportError:
                return httpx.Response(0)

        return self.clients.submit(answer)

    def wait_until_open(self, number):
        """Requests, of those routes that vLLM counts."""
        wait_until(lambda: self.get("/load").json()["server_load"] >= number, SECONDS)

    def get(self, route):
        return httpx.get(self.url + route, timeout=SECONDS)

    def suspended_build(self):
        """The process that builds an automaton, which makes no progress until it is
        resumed.
        """
        builders = []

        def are_there():
            builders[:] = children_of(psutil.Process(self.process.pid), BUILDER)
            return builders

        wait_until(are_there, SECONDS)
        (builder,) = builders
        builder.suspend()
        return builder

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

    def run(*arguments, **options):
        started.append(Watched(*arguments, log=tmp_path / "log", **options))
        return started[-1]

    yield run
    for watched in started:
        if watched.process.poll() is None:
            os.killpg(watched.process.pid, signal.SIGKILL)
        watched.clients.shutdown()


# Two ranks: what is left waits in the middle of a step for the one that is gone.
@pytest.mark.parametrize(("name", "ranks"), [("EngineCore", "1"), ("Worker", "2")])
def test_clients_of_a_killed_process_get_errors_and_the_server_fails(
    start, name, ranks
):
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
    wait_until(
        lambda: watched.process_called("Worker"),
        START_TIMEOUT_S,
        watched.process,
        watched.log,
    )
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


MOMENTS = ["non-default args", "EngineCore", "Worker", "Starting vLLM server"]
"""What the log then says, or the process that is then there."""


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_ends_a_server_at_any_moment_of_its_start(start, moment, servers):
    watched = start("--api-server-count", str(servers), logging_level="INFO")

    def has_come():
        return watched.process_called(moment) or moment in watched.log.read_text(
            errors="replace"
        )

    wait_until(has_come, START_TIMEOUT_S, watched.process, watched.log)
    if moment == "EngineCore":
        wait_until(lambda: watched.process_called(moment), SECONDS)
        watched.process_called(moment).suspend()  # it loads slowly
    watched.process.terminate()
    watched.check_the_end(0)


def test_all_who_wait_are_told_that_the_engine_has_died(start):
    watched = start("--enable-server-load-tracking")
    watched.wait_until_ready()
    engine = watched.process_called("EngineCore")
    engine.suspend()
    answers = [watched.ask("/v1/completions", **STRUCTURED)]
    build = watched.suspended_build()
    answers += [
        watched.ask("/v1/likelihoods", prompt="Reverse: Rome", answers=[" Oslo"]),
        watched.ask(),
        watched.ask(**LONG, stream=True),
        watched.ask("/v1/decisions", **DECISION),
        watched.ask("/sleep?level=0"),
    ]
    watched.wait_until_open(5)
    watched.process_called("")
    engine.kill()
    structured, likelihood, completion, stream, decision, _ = [
        answer.result(SECONDS) for answer in answers
    ]
    assert [
        answer.status_code for answer in (likelihood, completion, decision, structured)
    ] == [500] * 4
    assert likelihood.json()["error"]["message"].startswith("the engine has died")
    assert '"error"' in stream.text
    build.resume()
    watched.check_the_end(1)


def test_a_server_drains_what_it_has_taken_and_is_not_ready_meanwhile(start):
    watched = start("--shutdown-timeout", "60", "--enable-server-load-tracking")
    watched.wait_until_ready()
    answers = [watched.ask("/v1/completions", **STRUCTURED)]
    build = watched.suspended_build()
    engine = watched.process_called("EngineCore")
    engine.suspend()  # so that none is answered before the server is to stop
    answers += [
        watched.ask("/v1/decisions", **DECISION),
        watched.ask(**LONG | {"max_tokens": 256}, stream=True),
    ]
    watched.wait_until_open(3)
    watched.process.terminate()
    wait_until(lambda: watched.get("/health").status_code == 503, SECONDS)
    late = watched.ask().result(SECONDS)
    assert late.status_code == 503
    assert late.headers["retry-after"]
    engine.resume()
    build.resume()
    structured, decision, stream = [answer.result(SECONDS) for answer in answers]
    assert [structured.status_code, decision.status_code] == [200, 200]
    *_, last, done, _ = stream.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"]
    assert done == "data: [DONE]"
    watched.check_the_end(0)
    assert "Traceback" not in watched.tail()


def test_who_is_left_when_a_drain_ends_is_told(start):
    watched = start("--shutdown-timeout", "2", "--enable-server-load-tracking")
    watched.wait_until_ready()
    structured = watched.ask("/v1/completions", **STRUCTURED)
    build = watched.suspended_build()
    long, stream = watched.ask(), watched.ask(**LONG, stream=True)
    watched.wait_until_running(2)
    watched.process_called("EngineCore").suspend()  # so that neither is answered
    # As supervisors and terminals stop a server, all its processes at once.
    os.killpg(watched.process.pid, signal.SIGTERM)
    for answer in (structured.result(SECONDS), long.result(SECONDS)):
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
    assert "the server is shutting down" in stream.result(SECONDS).text
    build.resume()
    watched.check_the_end(0)
    assert "Traceback" not in watched.tail()


def test_no_connection_breaks_when_a_server_has_drained(start):
    watched = start("--shutdown-timeout", "2")
    watched.wait_until_ready()
    statuses = set()

    def ask_until_refused():
        body = {"model": "demo", "prompt": "a", "max_tokens": 8}
        while True:
            try:
                answer = httpx.post(
                    watched.url + "/v1/completions", json=body, timeout=SECONDS
                )
            except httpx.ConnectError:
                return
            statuses.add(answer.status_code)

    clients = [watched.clients.submit(ask_until_refused) for _ in range(16)]
    wait_until(lambda: statuses, SECONDS)
    watched.process.terminate()
    for client in clients:
        client.result(SECONDS)
    assert statuses <= {200, 503}
    watched.check_the_end(0)
