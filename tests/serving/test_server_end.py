"""The exit status of a server, with vLLM's parts played by small ones, and the lengths that it takes."""

import asyncio
from types import SimpleNamespace

import pytest

from dllm_engine import plugin
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.vllm_hooks import input_processor
from dllm_engine.vllm_hooks.server.start import serve_and_tell


class Engine:
    """An engine client: ``errored`` as soon as it has stopped, whatever the reason."""

    errored = False

    def shutdown(self, timeout=None):
        self.errored = True


def end(engine, until):
    """Run vLLM's part, ``until(engine)``, to its end."""
    closed = []

    async def close():
        closed.append(True)

    async def serve_http(app, sock, **kwargs):
        until(engine)
        return close()

    async def run():
        app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        await (await serve_and_tell(serve_http, app, None, host=None, port=1))

    try:
        asyncio.run(run())
    finally:
        assert closed == [True]


def test_a_server_whose_engine_died_fails():
    with pytest.raises(SystemExit) as ended:
        end(Engine(), lambda engine: setattr(engine, "errored", True))
    assert ended.value.code == 1


@pytest.mark.parametrize("until", [lambda engine: engine.shutdown(timeout=7), lambda engine: None])
def test_a_server_that_is_stopped_or_ends_for_another_reason_does_not(until):
    end(Engine(), until)


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
