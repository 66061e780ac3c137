"""What becomes of clients and of the exit status when a server ends, with vLLM's parts played by small ones."""

import asyncio
from types import SimpleNamespace

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from dllm_engine.vllm_hooks.shutdown import ENGINE_DIED, ending_well


class Engine:
    """An engine client: ``errored`` as soon as it has stopped, whatever the reason."""

    def __init__(self):
        self.errored = False
        self.stopped_after = None
        self.told = []
        self.output_processor = SimpleNamespace(propagate_error=self.told.append)

    def shutdown(self, timeout=None):
        self.errored, self.stopped_after = True, timeout


def serve(engine, *, until):
    """Run vLLM's part, ``until(engine)``, to its end; returns what the whole returns, or raises."""
    closed = []

    async def close():
        closed.append(True)

    async def serve_http(app, sock, **kwargs):
        assert (sock, kwargs) == (None, {"port": 1})
        await until(engine)
        return close()

    async def run():
        app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        await (await ending_well(serve_http)(app, None, port=1))

    try:
        asyncio.run(run())
    finally:
        assert closed == [True]


def test_a_server_that_is_asked_to_stop_tells_its_clients_and_succeeds():
    async def stop(engine):
        await asyncio.get_running_loop().run_in_executor(None, lambda: engine.shutdown(timeout=7))
        await asyncio.sleep(0)

    engine = Engine()
    serve(engine, until=stop)
    assert engine.stopped_after == 7
    assert [type(error) for error in engine.told] == [EngineDeadError]


def test_a_server_whose_engine_died_fails():
    async def die(engine):
        engine.errored = True

    with pytest.raises(SystemExit) as ended:
        serve(Engine(), until=die)
    assert ended.value.code == ENGINE_DIED


def test_a_server_that_ends_for_another_reason_is_left_alone():
    async def nothing(engine):
        pass

    serve(Engine(), until=nothing)
    serve(None, until=nothing)


@pytest.fixture
def limit(monkeypatch):
    from dllm_engine import plugin
    from dllm_engine.vllm_hooks import admission

    plugin.register()
    monkeypatch.setattr(admission, "_serves_diffusion", False)
    monkeypatch.setattr(admission, "_response_limit", None)
    return admission.limit_responses


@pytest.mark.parametrize(("asked", "given"), [(400, 400), (None, 256), (10, 10)])
def test_our_default_length_limits_nobody(limit, asked, given):
    from vllm.entrypoints.serve.utils import api_utils

    limit(None)
    assert api_utils.get_max_tokens(512, asked, 100, {"max_tokens": 256}, 256) == given


def test_lengths_above_a_servers_own_limit_are_refused(limit):
    from vllm.entrypoints.serve.utils import api_utils

    from dllm_engine.params import InvalidRequestError

    limit(300)
    assert api_utils.get_max_tokens(512, 300, 100, {"max_tokens": 300}, 300) == 300
    with pytest.raises(InvalidRequestError, match="max_tokens=301 is above this server's limit of 300"):
        api_utils.get_max_tokens(512, 301, 100, {"max_tokens": 300}, 300)
