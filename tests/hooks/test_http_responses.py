"""The fields that responses over HTTP get, and the errors where the model overflows or
the engine dies.
"""

import asyncio
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from dllm_engine.figures import DiffusionFigures
from dllm_engine.provisional import ProvisionalBlock
from dllm_engine.vllm_hooks.output_processor import DiffusionRequestOutput
from dllm_engine.vllm_hooks.server.responses import stream_with_fields
from tests.support.engines import assert_nothing_left, runner_of
from tests.support.http_app import chunks_of

SHOWN = ProvisionalBlock(
    block=0,
    num_blocks=1,
    gen_length=2,
    block_length=2,
    first_block_length=2,
    start=0,
    step=1,
    forward_pass=1,
    sent=0,
    token_ids=[7, 8],
    masked=[False, True],
    confidences=[0.5, 0.25],
    pieces=["a", None],
    special=[False, False],
)


def engine_output(*, tokens=(), shown=None, finish_reason=None, passes=1):
    made = CompletionOutput(
        0, "x" * len(tokens), list(tokens), None, None, finish_reason=finish_reason
    )
    made.diffusion, made.provisional = (
        DiffusionFigures(passes, passes, passes, 1),
        shown,
    )
    return DiffusionRequestOutput(
        "r", "a", [1], None, [made], finished=finish_reason is not None
    )


def with_fields(results):
    async def chunks(result_generator, **others):
        async for result in result_generator:
            yield f'data: {{"choices":[{{"index":0,"text":"{result.outputs[0].text}"}}]}}\n\n'

    given = {
        "request": SimpleNamespace(n=1, vllm_xargs=None),
        "request_id": "r",
        "model_name": "demo",
    }
    return stream_with_fields(chunks, given | {"result_generator": results})


def test_a_step_is_sent_while_the_next_result_is_not_there_yet():
    async def received():
        more = asyncio.Event()

        async def source():
            yield engine_output(shown=SHOWN)
            await more.wait()
            yield engine_output(tokens=[5], finish_reason="stop")

        events = with_fields(source())
        first = await anext(events)
        more.set()
        return [first, *[e async for e in events]]

    first, text = asyncio.run(asyncio.wait_for(received(), timeout=10))
    assert '"provisional"' in first
    assert '"text":"x"' in text
    assert '"diffusion"' in text


def test_a_client_that_hangs_up_closes_the_engines_results():
    closed = []

    async def endless():
        try:
            while True:
                yield engine_output(tokens=[5])
        finally:
            closed.append(True)

    async def hang_up():
        events = with_fields(endless())
        await anext(events)
        await events.aclose()
        await asyncio.sleep(0)

    asyncio.run(hang_up())
    assert closed == [True]


def test_a_slow_consumer_gets_the_latest_step_and_all_text_at_once():
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    for step, tokens in enumerate(([5], [], [6], []), start=1):
        collector.put(
            engine_output(tokens=tokens, shown=replace(SHOWN, step=step), passes=step)
        )
    merged = collector.get_nowait().outputs[0]
    assert (merged.token_ids, merged.text) == ([5, 6], "xx")
    assert (merged.diffusion.forward_passes, merged.provisional.step) == (4, 4)
    assert collector.get_nowait() is None


def test_a_slow_consumer_sees_how_blocks_ended_that_run_no_more():
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    for shown in (
        SHOWN,
        replace(SHOWN, masked=[False, False], pieces=["a", "b"]),
        replace(SHOWN, block=1, start=2),
    ):
        collector.put(engine_output(shown=shown))

    async def positions():
        async def merged():
            yield collector.get_nowait()

        return [
            json.loads(e.removeprefix("data: "))["provisional"]["positions"]
            async for e in with_fields(merged())
        ]

    assert asyncio.run(positions()) == [[0, 1], [2]]


TEXT = "Reverse: Rome"
ROUTES = {
    "completions": {"prompt": TEXT, "max_tokens": 16},
    "chat/completions": {
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 16,
    },
    "responses": {"input": TEXT, "max_output_tokens": 16},
    "messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 16},
}


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_a_stream_by_step_has_the_usual_chunks_of_one_by_block(client, route):
    asked = {"model": "demo", "stream": True, "ignore_eos": True} | ROUTES[route]

    def chunks(granularity):
        body = asked | {
            "vllm_xargs": {"block_length": 8, "stream_granularity": granularity}
        }
        return chunks_of(client.post(f"/v1/{route}", json=body))

    def without_names(found):
        return [
            chunk | {"id": "", "created": 0}
            for chunk in found
            if "provisional" not in chunk
        ]

    by_step = chunks("step")
    assert without_names(by_step) == without_names(chunks("block"))
    assert [chunk["choices"] for chunk in by_step if "provisional" in chunk] == [
        []
    ] * 16
    assert len({(chunk["id"], chunk["created"]) for chunk in by_step}) == 1
    assert all("provisional" in chunk for chunk in by_step[:8]), (
        "the role too comes with the first text"
    )


@pytest.fixture
def fail(demo, monkeypatch):
    """``fail(after, by_exception)``: each forward pass behind so many has infinite
    logits, or raises.
    """

    def fail(after, by_exception=False):
        predictor = runner_of(demo).rank.predictor
        compute, left = predictor.compute_logits, after

        def failing(hidden):
            nonlocal left
            left -= 1
            shard = compute(hidden)
            if left >= 0:
                return shard
            if by_exception:
                raise RuntimeError("the engine died")
            return type(shard)(shard.logits * float("inf"), shard.first_token)

        monkeypatch.setattr(predictor, "compute_logits", failing)

    yield fail
    demo.llm_engine.abort_request(
        [*demo.llm_engine.output_processor.request_states], internal=True
    )
    monkeypatch.undo()
    assert_nothing_left(demo)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_client_is_told_why_its_request_failed(
    client, fail, route, streamed, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    fail(after=0)
    answer = client.post(
        f"/v1/{route}", json=ROUTES[route] | {"model": "demo", "stream": streamed}
    )
    why = "the model produced logits that are NaN or infinite in forward pass 1"
    if not streamed:
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == why
        return
    assert answer.text.count(why) == 1
    if route in ("responses", "messages"):
        assert answer.text.strip().split("\n\n")[-1].startswith("event: error\ndata: ")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("by_exception", [False, True])
@pytest.mark.parametrize("granularity", ["block", "step"])
@pytest.mark.parametrize("after", [0, 3, 10])
def test_a_stream_that_is_cut_off_ends_with_an_error_event(
    client, fail, route, by_exception, granularity, after
):
    fail(after, by_exception)
    asked = {
        "stream": True,
        "vllm_xargs": {"block_length": 8, "stream_granularity": granularity},
    }
    answer = client.post(
        f"/v1/{route}",
        json=ROUTES[route] | {"model": "demo", "ignore_eos": True} | asked,
    )
    assert chunks_of(answer)[-1]["error"]["code"] == 500


def test_a_refusal_is_logged_without_a_traceback(client, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm")
    refused = ROUTES["messages"] | {"model": "demo", "vllm_xargs": {"steps": -1}}
    assert client.post("/v1/messages", json=refused).status_code == 400
    assert "steps=-1" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_client_that_leaves_brings_no_error(client, demo, route):
    body = json.dumps(ROUTES[route] | {"model": "demo"}).encode()
    messages = iter([{"type": "http.request", "body": body}])
    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/v1/{route}",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }
    sent = []

    async def receive():
        return next(messages, {"type": "http.disconnect"})

    async def send(message):
        sent.append(message)

    asyncio.run(client.app(scope, receive, send))
    assert sent[-1]["body"] in (b"null", b""), "which nobody reads"
    assert_nothing_left(demo)
