"""A server whose model overflows."""

import json

import pytest
import torch

from tests.support.engines import assert_nothing_left, runner_of
from tests.support.http_app import served


@pytest.fixture
def client(engines):
    """Asks the demo model, whose logits are infinite until the test ends."""
    llm = engines("demo", skip_tokenizer_init=False)
    weight = runner_of(llm).model.final_norm.weight.data
    before = weight.clone()
    weight.fill_(torch.finfo(weight.dtype).max)
    yield served(llm, "--served-model-name", "demo")
    weight.copy_(before)
    assert_nothing_left(llm)


@pytest.mark.parametrize(
    ("route", "streamed"),
    [(route, streamed) for route in ("completions", "chat/completions") for streamed in (False, True)]
    + [("responses", False)],
)
def test_a_client_is_told_why_its_request_failed(client, route, streamed):
    text = "Reverse: Rome"
    asked = {
        "completions": {"prompt": text, "max_tokens": 16},
        "chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 16},
        "responses": {"input": text, "max_output_tokens": 16},
    }[route]
    answer = client.post(f"/v1/{route}", json=asked | {"model": "demo", "stream": streamed})
    why = "the model produced logits that are NaN or infinite in forward pass 1"
    if not streamed:
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == why
        return
    assert why in answer.text
    *_, last_but_one, last = answer.text.strip().split("\n\n")
    assert json.loads(last_but_one.removeprefix("data: "))["error"]["code"] == 500
    assert last == "data: [DONE]"
