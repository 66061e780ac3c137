"""Under Ray: two tensor-parallel ranks, and the examples with two replicas of the demo
model, of which one is killed."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest
from openai import APIError, BadRequestError

from dllm_engine.demo.tasks import make_examples
from tests.distributed.test_tensor_parallel import check_two_ranks
from tests.support.checkout import EXAMPLES
from tests.support.engines import demo_answers
from tests.support.preloaded import Program, preloaded_programs, wait_until
from tests.support.server import Server

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

TIMEOUT_S = 600


def test_two_ranks_under_ray_give_the_tokens_of_one(
    engines, checkpoint_of, monkeypatch
):
    import ray

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(
        sys, "executable", str(preloaded_programs() / "python")
    )  # what Ray starts workers with
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    try:
        check_two_ranks(engines, checkpoint_of, "sdar", backend="ray")
    finally:
        ray.shutdown()


@pytest.fixture
def environment():
    """As a newcomer's: nothing set that this session's own engines need."""
    variables = {
        key: value for key, value in os.environ.items() if not key.startswith("VLLM_")
    }
    return variables | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(EXAMPLES.parent),
    }


@pytest.fixture(scope="module")
def examples():
    return make_examples("names", 6, seed=21) + make_examples("reverse", 4, seed=21)


@pytest.fixture(scope="module")
def alone(engines, examples):
    return demo_answers(engines, examples)


def workers(program, name):
    """Processes of Ray's workers with ``name`` in their titles: forks beside
    ``program``.
    """
    found = []
    for process in psutil.Process(program.pid).parent().children():
        with suppress(psutil.Error):
            found += [process] if f"ray::{name}" in " ".join(process.cmdline()) else []
    return found


def engine_of(replica):
    """The engine process of a replica, told by the memory that vLLM takes: under Ray
    not each gets vLLM's title.
    """
    with suppress(psutil.Error):
        return next(
            (
                child
                for child in replica.children()
                if child.memory_info().rss > 100 << 20
            ),
            None,
        )
    return None


def test_lines_are_answered_as_by_one_process_and_once_though_a_replica_is_killed(
    environment, tmp_path, examples, alone
):
    good = [
        {"id": i, "prompt": example.prompt} for i, example in enumerate(examples * 10)
    ]
    bad = ["not JSON", json.dumps({"prompts": "x"})]
    (tmp_path / "in.jsonl").write_text("\n".join([*bad, *map(json.dumps, good)]) + "\n")
    output, log = tmp_path / "out.jsonl", tmp_path / "log"
    command = [
        str(EXAMPLES / "ray_batch.py"),
        "in.jsonl",
        "out.jsonl",
        "--replicas",
        "2",
    ]
    command += "--lines 8 --gen-length 32 --block-length 8".split()
    with log.open("wb") as stderr:
        process = Program(command, cwd=tmp_path, env=environment, stderr=stderr)
    try:
        wait_until(
            lambda: output.exists() and output.stat().st_size, TIMEOUT_S, process, log
        )
        killed, _ = workers(process, "Replica")
        processes = killed.children(recursive=True)
        killed.kill()
        assert not psutil.wait_procs(processes, timeout=60)[1], (
            "what belonged to the killed replica lives on"
        )
        assert process.wait(TIMEOUT_S) == 1, log.read_text(errors="replace")[-4000:]
    finally:
        process.kill()

    assert "errors: 2" in log.read_text()
    records = sorted(
        map(json.loads, output.read_text().splitlines()),
        key=lambda record: record["index"],
    )
    assert [record["index"] for record in records] == list(range(len(bad) + len(good)))
    assert [
        sorted(record.keys() & {"error", "text"}) for record in records[: len(bad)]
    ] == [["error"]] * len(bad)
    for i, (record, expected) in enumerate(
        zip(records[len(bad) :], alone * 10, strict=True)
    ):
        assert record["id"] == i
        assert (record["token_ids"], record["text"]) == (
            list(expected.token_ids),
            expected.text,
        )


class RayServer(Server):
    def __init__(self, environment, log):
        options = "--min-replicas 2 --max-replicas 2 --max-model-len 512".split()
        super().__init__(
            EXAMPLES / "ray_serve_app.py",
            "demo",
            *options,
            log=log,
            environment=environment,
        )

    def wait_until(self, condition):
        wait_until(condition, TIMEOUT_S, self.process, self.log)

    def replicas(self):
        return [
            process
            for process in workers(self.process, "ServeReplica:dllm:DiffusionServer")
            if engine_of(process)
        ]

    def text(self, prompt):
        return self.chat(prompt).choices[0].message.content

    def stop(self):
        tops = [psutil.Process(self.process.pid), *workers(self.process, "")]
        everything = [
            *tops[1:],
            *(child for top in tops for child in top.children(recursive=True)),
        ]
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(180), psutil.wait_procs(everything, timeout=30)[1]
        finally:
            for process in [*everything, self.process]:
                if (
                    process.poll() is None
                    if process is self.process
                    else process.is_running()
                ):
                    process.kill()


def test_ray_serve_answers_as_one_process_and_replaces_an_engine_that_is_killed(
    environment, tmp_path, examples, alone
):
    """The replica of that engine ends as one that is killed itself, which the test
    above does.
    """
    server = RayServer(environment, tmp_path / "log")
    try:
        server.wait_until_ready()
        server.wait_until(lambda: len(server.replicas()) == 2)
        killed, _ = server.replicas()
        prompts = [example.prompt for example in examples]
        expected = [answer.text for answer in alone]
        deltas = [
            chunk.choices[0].delta.content or ""
            for chunk in server.chat(prompts[0], stream=True)
        ]
        assert "".join(deltas) == expected[0]
        assert (
            server.client()
            .completions.create(model="demo", prompt="x", max_tokens=8)
            .usage
        )
        with pytest.raises(BadRequestError):
            server.chat("x", presence_penalty=0.5)

        processes = killed.children(recursive=True)
        engine_of(killed).kill()
        # What that engine ran ends with an error; the other replica goes on.
        with ThreadPoolExecutor(16) as clients:
            asked = [
                (clients.submit(server.text, prompt), text)
                for prompt, text in zip(prompts * 4, expected * 4, strict=True)
            ]
            failed = [answer for answer, _ in asked if answer.exception()]
            assert len(failed) < len(asked)
            assert all(
                answer in failed or answer.result() == text for answer, text in asked
            )
            assert all(isinstance(answer.exception(), APIError) for answer in failed)
        server.wait_until(
            lambda: (
                len([replica for replica in server.replicas() if replica != killed])
                == 2
            )
        )
        assert not psutil.wait_procs(processes, timeout=30)[1], (
            "what belonged to the killed engine lives on"
        )
        with ThreadPoolExecutor(4) as clients:
            assert list(clients.map(server.text, prompts)) == expected
    finally:
        status, left = server.stop()
    assert status == 0
    assert not left
