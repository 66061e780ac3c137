"""A server whose model overflows, or whose engine dies."""

import pytest

from tests.support.engines import assert_nothing_left, runner_of
from tests.support.http_app import chunks_of

TEXT = "Reverse: Rome"
ROUTES = {
    "completions": {"prompt": TEXT, "max_tokens": 16},
    "chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 16},
    "responses": {"input": TEXT, "max_output_tokens": 16},
}


@pytest.fixture
def fail(demo, monkeypatch):
    """``fail(after, by_exception)``: each forward pass behind so many has infinite logits, or raises."""

    def fail(after, by_exception=False):
        predictor = runner_of(demo).predictor
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
    demo.llm_engine.abort_request([*demo.llm_engine.output_processor.request_states], internal=True)
    monkeypatch.undo()
    assert_nothing_left(demo)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_client_is_told_why_its_request_failed(client, fail, route, streamed):
    fail(after=0)
    answer = client.post(f"/v1/{route}", json=ROUTES[route] | {"model": "demo", "stream": streamed})
    why = "the model produced logits that are NaN or infinite in forward pass 1"
    if not streamed:
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == why
        return
    assert why in answer.text
    if route == "responses":
        assert answer.text.strip().split("\n\n")[-1].startswith("event: error\ndata: ")


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("by_exception", [False, True])
@pytest.mark.parametrize("granularity", ["block", "step"])
@pytest.mark.parametrize("after", [0, 3, 10])
def test_a_stream_that_is_cut_off_ends_with_an_error_event(client, fail, route, by_exception, granularity, after):
    fail(after, by_exception)
    asked = {"stream": True, "vllm_xargs": {"block_length": 8, "stream_granularity": granularity}}
    answer = client.post(f"/v1/{route}", json=ROUTES[route] | {"model": "demo", "ignore_eos": True} | asked)
    assert chunks_of(answer)[-1]["error"]["code"] == 500
