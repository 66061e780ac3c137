"""The Ray examples with two replicas of the demo model: the answers of one process, and what happens to a replica that
is killed."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from dllm_engine.demo.tasks import make_examples
from tests.serving.server import free_port

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIMEOUT_S = 600
PARAMS = {"gen_length": 32, "block_length": 8}


@pytest.fixture
def environment():
    """As a newcomer's: nothing set that this session's own engines need."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    return variables | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(EXAMPLES.parent)}


@pytest.fixture(scope="module")
def examples():
    return make_examples("names", 6, seed=21) + make_examples("reverse", 4, seed=21)


@pytest.fixture(scope="module")
def alone(engines, examples):
    """The answers of one engine in this process."""
    from dllm_engine import DiffusionParams

    llm = engines("demo", skip_tokenizer_init=False, dtype="auto", max_model_len=512, trace=False)
    chats = [[{"role": "user", "content": example.prompt}] for example in examples]
    return [output.outputs[0] for output in llm.chat(chats, DiffusionParams(**PARAMS), use_tqdm=False)]


def run_batch(environment, tmp_path):
    command = [sys.executable, EXAMPLES / "ray_batch.py", "in.jsonl", "out.jsonl", "--replicas", "2"]
    command += ["--batch-size", "4", "--max-model-len", "512"]
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def test_batches_on_replicas_are_answered_as_by_one_process_and_resumed(environment, tmp_path, examples, alone):
    good = [{"id": i, "prompt": example.prompt, **PARAMS} for i, example in enumerate(examples)]
    bad = ["not JSON", json.dumps({"prompt": "x", "stepz": 3}), json.dumps({"id": "b", "prompt": "x", "steps": "many"})]
    (tmp_path / "in.jsonl").write_text("\n".join([*bad, *map(json.dumps, good)]) + "\n")
    output = tmp_path / "out.jsonl"

    done = run_batch(environment, tmp_path)
    assert done.returncode == 1, done.stderr[-4000:]
    assert "errors: 3" in done.stderr
    records = {record["index"]: record for record in map(json.loads, output.read_text().splitlines())}
    assert sorted(records) == list(range(len(bad) + len(good)))
    assert [sorted(records[i].keys() & {"error", "text"}) for i in range(len(bad))] == [["error"]] * len(bad)
    assert "'stepz'" in records[1]["error"]
    for i, expected in enumerate(alone):
        record = records[len(bad) + i]
        assert record["id"] == i
        assert (record["token_ids"], record["text"]) == (list(expected.token_ids), expected.text)

    whole = output.read_text().splitlines(keepends=True)
    output.write_text("".join(whole[:5]) + whole[5][:20])
    done = run_batch(environment, tmp_path)
    assert f"answered: {len(whole) - 5}, before: 5" in done.stderr, done.stderr[-4000:]
    again = output.read_text().splitlines(keepends=True)
    assert again[:5] == whole[:5]
    assert sorted(again) == sorted(whole)


class RayServer:
    """`ray_serve_app.py` with two replicas."""

    def __init__(self, environment, log):
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [sys.executable, EXAMPLES / "ray_serve_app.py", "--port", self.url.split(":")[-1]]
        command += ["--min-replicas", "2", "--max-replicas", "2", "--max-model-len", "512"]
        self.log = log
        self.process = subprocess.Popen(
            command, env=environment, stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True
        )

    def wait_until(self, condition):
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < end, self.log.read_text(errors="replace")[-4000:]
            time.sleep(1)

    def replicas(self):
        """Replicas whose engine has a worker."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if "ServeReplica" in process.name() + " ".join(process.cmdline()):
                    names = [child.name() for child in process.children(recursive=True)]
                    found += [process] if any("Worker" in name for name in names) else []
            except psutil.Error:
                continue
        return found

    def post(self, path, body):
        request = urllib.request.Request(
            self.url + path, json.dumps({"model": "demo", **body}).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=120).read().decode()

    def chat(self, prompt, **more):
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": PARAMS["gen_length"]}
        return self.post("/v1/chat/completions", body | {"vllm_xargs": {"block_length": PARAMS["block_length"]}} | more)

    def chat_retried(self, prompt):
        """(text, attempts)."""
        for attempt in range(1, 20):
            try:
                return json.loads(self.chat(prompt))["choices"][0]["message"]["content"], attempt
            except (urllib.error.HTTPError, OSError):
                time.sleep(1)
        raise AssertionError("every attempt failed")

    def stop(self):
        everything = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(180), psutil.wait_procs(everything, timeout=30)[1]
        finally:
            for process in [*everything, self.process]:
                if process.poll() is None if process is self.process else process.is_running():
                    process.kill()


def is_healthy(url):
    try:
        with urllib.request.urlopen(url + "/health", timeout=5):
            return True
    except OSError:
        return False


def test_ray_serve_answers_as_one_process_and_replaces_a_killed_replica(environment, tmp_path, examples, alone):
    server = RayServer(environment, tmp_path / "log")
    try:
        server.wait_until(lambda: "serving demo on" in server.log.read_text(errors="replace"))
        assert is_healthy(server.url)
        assert len(server.replicas()) == 2
        prompts = [example.prompt for example in examples]
        expected = [answer.text for answer in alone]
        with ThreadPoolExecutor(4) as clients:
            assert [text for text, _ in clients.map(server.chat_retried, prompts)] == expected
        streamed = [json.loads(line[6:]) for line in server.chat(prompts[0], stream=True).splitlines() if "{" in line]
        deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in streamed if chunk["choices"]]
        assert "".join(deltas) == expected[0]
        assert json.loads(server.post("/v1/completions", {"prompt": "x", "max_tokens": 8}))["usage"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.chat("x", presence_penalty=0.5)
        assert refused.value.code == 400

        killed = server.replicas()[0]
        engine = killed.children(recursive=True)
        killed.kill()
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(server.chat_retried, prompts))
        assert [text for text, _ in answers] == expected
        server.wait_until(lambda: len([p for p in server.replicas() if p.pid != killed.pid]) == 2)
        assert not psutil.wait_procs(engine, timeout=30)[1], "the killed replica's engine lives on"
        assert server.chat_retried(prompts[0])[0] == expected[0]
    finally:
        status, left = server.stop()
    assert status == 0
    assert not left
