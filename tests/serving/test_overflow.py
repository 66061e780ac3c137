"""A server whose model overflows."""

import json
import shutil
import urllib.error
import urllib.request

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm_engine.demo import DEMO_MODEL_DIR
from tests.support.server import running, scrape

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def overflowing_server(tmp_path_factory):
    """Serves a copy of the demo model whose logits are infinite."""
    folder = tmp_path_factory.mktemp("overflowing")
    model = shutil.copytree(DEMO_MODEL_DIR, folder / "model")
    tensors = load_file(model / "model.safetensors")
    norm = tensors["model.transformer.ln_f.weight"]
    norm.fill_(torch.finfo(norm.dtype).max)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    arguments = ("serve", str(model), "--served-model-name", "overflowing", "--max-model-len", "512")
    with running("dllm", *arguments, log=folder / "log") as server:
        yield server


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
def test_a_client_is_told_why_its_request_failed_and_the_server_goes_on(overflowing_server, route, streamed):
    url, text = overflowing_server.url, "Reverse: Rome"
    asked = {
        "completions": {"prompt": text, "max_tokens": 16},
        "chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 16},
        "responses": {"input": text, "max_output_tokens": 16},
    }[route]
    body = asked | {"model": "overflowing", "stream": streamed}
    request = urllib.request.Request(
        f"{url}/v1/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    before = scrape(url)["vllm:dllm_requests_failed_total"]
    if streamed:
        with urllib.request.urlopen(request, timeout=60) as response:
            events = response.read().decode()
        assert "the model produced logits that are NaN or infinite in forward pass 1" in events
        *_, last_but_one, last = events.strip().split("\n\n")
        if route == "responses":
            assert last.startswith("event: error\ndata: ")
        else:
            assert json.loads(last_but_one.removeprefix("data: "))["error"]["code"] == 500
            assert last == "data: [DONE]"
    else:
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request, timeout=60)
        assert raised.value.code == 500
        message = json.load(raised.value)["error"]["message"]
        assert message == "the model produced logits that are NaN or infinite in forward pass 1"
    values = scrape(url)
    assert values["vllm:dllm_requests_failed_total"] == before + 1
    assert values["vllm:num_requests_running"] == 0
