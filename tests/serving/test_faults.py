"""A server whose processes are killed, that is asked to stop while it answers, or whose model overflows."""

import json
import os
import shutil
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm_engine.demo import DEMO_MODEL_DIR
from tests.serving.server import Server, running, scrape

pytestmark = pytest.mark.slow

NUM_CLIENTS = 3
SECONDS = 20
"""Far above what it takes, far below a timeout of any client."""


@pytest.fixture
def server(tmp_path, request, monkeypatch):
    if "--tensor-parallel-size" in request.param:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    server = Server("dllm", "serve", "demo", "--max-model-len", "2048", *request.param, log=tmp_path / "log")
    server.wait_until_ready()
    yield server
    if server.process.poll() is None:
        os.killpg(server.process.pid, signal.SIGKILL)


def ask(server, num_tokens):
    """(HTTP status, seconds) of a request; a status of 0 where the connection broke."""
    body = {"model": "demo", "prompt": "Reverse: Rome Tom Oslo", "max_tokens": num_tokens, "ignore_eos": True}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            tokens = json.load(response)["usage"]["completion_tokens"]
            assert tokens == num_tokens
            return response.status, time.monotonic() - start
    except urllib.error.HTTPError as error:
        return error.code, time.monotonic() - start
    except OSError:
        return 0, time.monotonic() - start


def while_asked(server, num_tokens, act):
    """What clients got who were waiting when ``act`` was called; the seconds since then, and the exit status."""
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        answers = [clients.submit(ask, server, num_tokens) for _ in range(NUM_CLIENTS)]
        deadline = time.monotonic() + 60
        while scrape(server.url)["vllm:num_requests_running"] < NUM_CLIENTS:
            assert time.monotonic() < deadline, "the requests never ran together; ask for more tokens"
            time.sleep(0.05)
        act()
        start = time.monotonic()
        statuses = [answer.result()[0] for answer in answers]
        seconds = time.monotonic() - start
    return statuses, seconds, server.process.wait(SECONDS)


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


@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
@pytest.mark.parametrize("streamed", [False, True])
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
    before = scrape(url)["dllm:requests_failed_total"]
    if streamed:
        with urllib.request.urlopen(request, timeout=60) as response:
            events = response.read().decode()
        assert "the model produced logits that are NaN or infinite in forward pass 1" in events
        if route != "responses":
            *_, error, done = events.strip().split("\n\n")
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == 500
            assert done == "data: [DONE]"
    else:
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request, timeout=60)
        assert raised.value.code == 500
        message = json.load(raised.value)["error"]["message"]
        assert message == "the model produced logits that are NaN or infinite in forward pass 1"
    values = scrape(url)
    assert values["dllm:requests_failed_total"] == before + 1
    assert values["vllm:num_requests_running"] == 0


def process_called(server, name):
    return next(p for p in psutil.Process(server.process.pid).children(recursive=True) if name in p.name())


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("psm_", "vllm_"))}


def mapped_by(processes) -> set[str]:
    """Names of the shared memory that processes have mapped, whether or not it is still found by them."""
    found = set()
    for process in processes:
        found |= {Path(region.path.removesuffix(" (deleted)")).name for region in process.memory_maps()}
    return {name for name in found if name.startswith(("psm_", "vllm_"))}


def assert_nothing_left(server, processes, mapped) -> None:
    """No process and no shared memory of a server that has ended, nor a warning about any."""
    _, alive = psutil.wait_procs(processes, timeout=SECONDS)
    assert not alive
    assert not mapped & shared_memory()
    assert "leaked" not in server.log.read_text(errors="replace")


@pytest.mark.parametrize("server", [("--tensor-parallel-size", "2")], indirect=True)
@pytest.mark.parametrize("name", ["EngineCore", "Worker"])
def test_clients_of_a_killed_process_get_errors_and_the_server_fails(server, name):
    processes = psutil.Process(server.process.pid).children(recursive=True)
    mapped = mapped_by(processes)
    assert mapped
    statuses, seconds, exit_status = while_asked(server, 600, process_called(server, name).kill)
    assert all(status in (0, 500, 503) for status in statuses), statuses
    assert seconds < SECONDS
    assert exit_status == 1, server.tail()
    assert_nothing_left(server, processes, mapped)


@pytest.mark.parametrize("server", [("--shutdown-timeout", "60")], indirect=True)
def test_requests_that_run_are_finished_before_the_server_stops(server):
    processes = psutil.Process(server.process.pid).children(recursive=True)
    mapped = mapped_by(processes)
    statuses, _, exit_status = while_asked(server, 300, server.process.terminate)
    assert statuses == [200] * NUM_CLIENTS
    assert exit_status == 0, server.tail()
    assert_nothing_left(server, processes, mapped)


@pytest.mark.parametrize("server", [("--shutdown-timeout", "1")], indirect=True)
def test_clients_whose_requests_outlast_the_shutdown_timeout_get_errors(server):
    statuses, seconds, exit_status = while_asked(server, 600, server.process.terminate)
    assert all(status in (0, 500, 503) for status in statuses), statuses
    assert seconds < SECONDS
    assert exit_status == 0, server.tail()
