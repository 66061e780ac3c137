"""Clients and exit status of a server that ends, with vLLM's parts played by small ones."""

import asyncio
from types import SimpleNamespace

import psutil
import pytest
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError

from dllm_engine import plugin
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.vllm_hooks import input_processor
from dllm_engine.vllm_hooks.server.shutdown import STOPPING, ServerStopping, serve_gracefully
from tests.support.http_app import app_client


class Engine:
    """An engine client: ``errored`` as soon as it has stopped, whatever the reason."""

    def __init__(self, *, owns_processes=True):
        resources = SimpleNamespace(engine_manager="manager" if owns_processes else None)
        self.engine_core = SimpleNamespace(resources=resources)
        self.errored, self.stopped_after = False, None
        self.told, self.queue, self.processed = [], [], []
        self.likelihoods = SimpleNamespace(told=[])
        self.likelihoods.end = self.likelihoods.told.append
        waiting = SimpleNamespace(queue=SimpleNamespace(put=self.queue.append))
        self.output_processor = SimpleNamespace(
            request_states={"waiting": waiting},
            propagate_error=self.told.append,
            process_outputs=lambda outputs, *rest: self.processed.extend(outputs),
        )

    def shutdown(self, timeout=None):
        self.errored, self.stopped_after = True, timeout


def serve(engine, *, until):
    """Run vLLM's part, ``until(engine)``, to its end."""
    closed = []

    async def close():
        closed.append(True)

    server = SimpleNamespace(should_exit=False, shutdown=close)
    state = SimpleNamespace(engine_client=engine, server=server, likelihoods=engine.likelihoods)
    app = engine.app = SimpleNamespace(state=state)

    async def serve_http(app, sock, **kwargs):
        assert sock is None
        assert kwargs["port"] == 1
        await until(engine)
        return close()

    async def run():
        await (await serve_gracefully(serve_http, app, None, host=None, port=1))

    try:
        asyncio.run(run())
    finally:
        assert closed == [True]
        assert engine.likelihoods.told == engine.told


async def stop(engine):
    """As vLLM does when the server is asked to stop."""
    await asyncio.get_running_loop().run_in_executor(None, lambda: engine.shutdown(timeout=7))
    await asyncio.sleep(0)


def test_a_worker_that_ends_while_vllm_asks_who_has_the_port_cuts_off_no_client():
    async def stop_and_ask(engine):
        await stop(engine)
        raise psutil.ZombieProcess(1)

    serve(Engine(), until=stop_and_ask)


def test_an_api_server_beside_others_lets_its_requests_finish_before_it_stops():
    async def finish_meanwhile(engine):
        stopping = asyncio.create_task(stop(engine))
        await asyncio.sleep(0.3)
        assert engine.stopped_after is None
        engine.output_processor.request_states.clear()
        await stopping

    engine = Engine(owns_processes=False)
    serve(engine, until=finish_meanwhile)
    assert engine.stopped_after == 7


def test_requests_that_a_stopping_engine_aborts_get_an_error_and_others_go_on():
    aborted = EngineCoreOutput("waiting", [], finish_reason=FinishReason.ABORT)
    unknown = EngineCoreOutput("gone", [], finish_reason=FinishReason.ABORT)
    finished = EngineCoreOutput("other", [5], finish_reason=FinishReason.STOP)

    async def abort(engine):
        engine.output_processor.process_outputs([aborted])
        assert engine.processed == [aborted]  # before it stops, that is the client's own doing
        engine.processed.clear()
        await stop(engine)
        engine.output_processor.process_outputs([aborted, unknown, finished])

    engine = Engine()
    serve(engine, until=abort)
    assert engine.processed == [finished]
    assert [str(error) for error in engine.queue] == [str(ServerStopping())]


def test_a_server_that_stops_does_not_blame_the_engine():
    async def stop_then_lose_the_engine(engine):
        await stop(engine)
        engine.output_processor.propagate_error(EngineDeadError())

    engine = Engine()
    serve(engine, until=stop_then_lose_the_engine)
    assert {type(error) for error in engine.told} == {ServerStopping}


def test_a_server_whose_engine_died_says_so_and_fails():
    async def die(engine):
        engine.errored = True
        engine.output_processor.propagate_error(EngineDeadError())

    engine = Engine()
    with pytest.raises(SystemExit) as ended:
        serve(engine, until=die)
    assert ended.value.code == 1
    assert "the engine died" in str(engine.told[0])
    assert engine.app.state.refusal == str(engine.told[0])


def test_a_server_that_ends_for_another_reason_is_left_alone():
    serve(Engine(), until=lambda engine: asyncio.sleep(0))


def test_a_server_that_stops_refuses_everything_but_its_metrics():
    client = app_client("--api-key", "secret")
    key = {"Authorization": "Bearer secret"}
    client.app.state.engine_client = None
    assert client.get("/health").status_code == 200
    client.app.state.refusal = STOPPING
    for answer in (
        client.get("/health"),
        client.get("/v1/models", headers=key),
        client.post("/v1/completions", json={"prompt": "x"}, headers=key),
        client.post("/v1/completions", content=b"{", headers=key),
    ):
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert answer.headers["connection"] == "close"
        assert "shutting down" in answer.json()["error"]["message"]
    assert client.get("/v1/models").status_code == 401
    assert client.get("/metrics").status_code == 200
    another_model = app_client(ours=False)
    another_model.app.state.engine_client, another_model.app.state.refusal = None, STOPPING
    assert another_model.get("/health").status_code == 200


def test_lengths_above_a_servers_own_limit_are_refused_and_our_default_limits_nobody(monkeypatch):
    from vllm.entrypoints.serve.utils import api_utils

    plugin.register()
    monkeypatch.setattr(input_processor, "_response_limit", None)
    input_processor.limit_responses(None)
    for asked, given in ((400, 400), (None, 256), (10, 10)):
        assert api_utils.get_max_tokens(512, asked, 100, {"max_tokens": 256}, 256) == given
    input_processor.limit_responses(300)
    assert api_utils.get_max_tokens(512, 300, 100, {"max_tokens": 300}, 300) == 300
    with pytest.raises(InvalidRequestError, match="max_tokens=301 is above this server's limit of 300"):
        api_utils.get_max_tokens(512, 301, 100, {"max_tokens": 300}, 300)
