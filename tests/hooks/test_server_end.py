"""Requests of a server that stops, or whose engine has died, get an answer."""

import asyncio
import json
import socket
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from dllm_engine.vllm_hooks.server import open_requests
from dllm_engine.vllm_hooks.server.app import rewriter
from dllm_engine.vllm_hooks.server.open_requests import Answers, OpenRequests
from dllm_engine.vllm_hooks.server.stop import (
    EngineDied,
    ServerStopping,
    serve_and_tell,
)

FIRST_EVENT = 'data: {"sequence_number":7}\n\n'


async def wait_for_ever(request):
    await asyncio.Event().wait()


async def read(request: Request):
    await request.body()
    return PlainTextResponse("read")


async def stream(request):
    async def events():
        yield FIRST_EVENT
        await asyncio.Event().wait()

    return StreamingResponse(events(), media_type="text/event-stream")


async def fail(request):
    async def events():
        yield FIRST_EVENT
        raise ValueError("broken")

    return StreamingResponse(events(), media_type="text/event-stream")


async def fail_when_it_stops(request):
    while request.app.state.open_requests.error is None:
        await asyncio.sleep(0)
    return JSONResponse({"error": "Server shutting down"}, 500)


async def full(request):
    return PlainTextResponse("the queue is full", 503)


async def refused_text(request):
    return PlainTextResponse("not so", 404)


async def refused(request):
    return JSONResponse({"error": {"message": "max_tokens:\n too many"}}, 400)


async def metrics(request):
    return PlainTextResponse("metrics")


HANDLERS = [wait_for_ever, read, stream, fail, fail_when_it_stops, full, metrics]
REFUSING = [refused, refused_text]


class Answered:
    """A request whose body never ends; what has been sent of its answer."""

    def __init__(self, app, path):
        self.status, self.headers, self.text, self.is_complete = None, {}, "", False
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [],
            "query_string": b"",
            "app": app,
        }
        self.task = asyncio.create_task(app(scope, self.receive, self.send))

    async def receive(self):
        await asyncio.Event().wait()

    async def send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                name.decode(): value.decode() for name, value in message["headers"]
            }
        else:
            self.text += message["body"].decode()
            self.is_complete = not message.get("more_body")


def answers(paths, error=None, *, later=()):
    """Answers to requests that are open when the server ends with an error, and to
    later ones.
    """

    async def run():
        app = Starlette(
            routes=[
                Route(f"/{each.__name__}", each, methods=["POST"])
                for each in [*HANDLERS, *REFUSING]
            ]
            + [Route(f"/v1/{name}", stream, methods=["POST"]) for name in STREAMS]
        )
        requests = app.state.open_requests = OpenRequests()
        app.add_middleware(Answers, requests=requests, rewriter=rewriter)
        answered = [Answered(app, path) for path in paths]
        await asyncio.sleep(0.05)
        if error is not None:
            await requests.end(error)
        answered += [Answered(app, path) for path in later]
        await asyncio.wait_for(asyncio.gather(*(each.task for each in answered)), 10)
        return answered

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "status"), [(ServerStopping(), 503), (EngineDied(), 500)]
)
def test_whatever_a_request_waits_for_it_is_told(error, status):
    for answer in answers(
        ["/wait_for_ever", "/read", "/fail_when_it_stops"], error, later=["/full"]
    ):
        assert (answer.status, answer.is_complete) == (status, True)
        assert str(error) in answer.text
        assert ("retry-after" in answer.headers) == (status == 503)


TEXT = str(ServerStopping())
OPENAI = {"message": TEXT, "type": "Service Unavailable", "param": None, "code": 503}
STREAMS = {
    "chat/completions": f"data: {json.dumps({'error': OPENAI})}\n\ndata: [DONE]\n\n",
    "responses": 'event: error\ndata: {"type": "error", "code": "server_error", '
    f'"message": "{TEXT}", "param": null, "sequence_number": 8}}\n\n',
    "messages": 'event: error\ndata: {"type": "error", "error": '
    f'{{"type": "overloaded_error", "message": "{TEXT}"}}}}\n\n',
}


@pytest.mark.parametrize("route", STREAMS)
def test_a_stream_ends_with_the_error_in_the_form_of_its_route(route):
    (answer,) = answers([f"/v1/{route}"], ServerStopping())
    assert answer.status == 200
    assert answer.text == FIRST_EVENT + STREAMS[route]
    assert answer.is_complete


def test_a_stream_that_fails_ends_with_the_error():
    (answer,) = answers(["/fail"])
    assert answer.text.startswith(FIRST_EVENT)
    assert "broken" in answer.text
    assert answer.is_complete


def test_connections_close_with_the_last_answers_of_a_server_that_ends():
    taken, late = answers(["/wait_for_ever"], ServerStopping(), later=["/read"])
    assert [taken.headers["connection"], late.headers["connection"]] == ["close"] * 2
    (answer,) = answers(["/full"])
    assert "connection" not in answer.headers


def test_metrics_can_be_read_while_it_drains():
    (answer,) = answers([], ServerStopping(), later=["/metrics"])
    assert (answer.status, answer.text) == (200, "metrics")


def test_a_full_queue_says_when_to_ask_again():
    (answer,) = answers(["/full"])
    assert (answer.status, answer.text, answer.headers["retry-after"]) == (
        503,
        "the queue is full",
        "1",
    )


def test_a_drain_does_not_wait_for_an_engine_that_has_nothing_to_do():
    waited = []
    engine = SimpleNamespace(
        shutdown=lambda timeout: waited.append(timeout),
        output_processor=SimpleNamespace(propagate_error=None),
        output_handler=None,
        errored=False,
    )
    app = Starlette()
    app.state.engine_client, app.state.open_requests = engine, OpenRequests()
    state = SimpleNamespace(connections=set())
    app.state.server = SimpleNamespace(started=True, server_state=state)

    async def serve_http(app, sock, **options):
        await asyncio.to_thread(app.state.engine_client.shutdown, timeout=600)
        return asyncio.sleep(0)

    async def serve():
        await (await serve_and_tell(serve_http, app, None))

    asyncio.run(serve())
    assert waited == [3]


def test_who_reads_the_address_in_the_log_may_connect(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    async def serve_http(app, sock, **settings):
        with socket.create_connection(sock.getsockname()):
            return "ended"

    async def serve():
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            return await serve_and_tell(serve_http, app, bound)

    app = Starlette()
    app.state.args = SimpleNamespace(model="demo", ssl_certfile=None, root_path="")
    app.state.open_requests = OpenRequests()
    app.state.engine_client = SimpleNamespace(
        shutdown=None,
        errored=False,
        output_processor=SimpleNamespace(propagate_error=None),
    )
    assert asyncio.run(serve()) == "ended"


@pytest.mark.parametrize(
    ("route", "line"),
    [
        ("/refused", "refused /refused: 400: max_tokens: too many"),
        ("/refused_text", "refused /refused_text: 404: not so"),
        ("/read", None),
    ],
)
def test_the_log_says_why_a_client_is_refused(lines_of, route, line):
    lines = lines_of(open_requests.logger, "info")
    answers([route], ServerStopping() if line is None else None)
    assert lines == ([] if line is None else [line])
