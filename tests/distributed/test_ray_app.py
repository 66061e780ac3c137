"""The Ray examples without a cluster: what they build, and what their classes do when a replica dies."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("ray.serve")
    return load("ray_serve_app")


@pytest.mark.parametrize("name", ["ray_batch", "ray_serve_app"])
def test_without_ray_there_is_help_and_a_line_that_names_the_extra(monkeypatch, capsys, name):
    monkeypatch.setitem(sys.modules, "ray", None)
    program = load(name)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 0
    assert "--model" in capsys.readouterr().out

    monkeypatch.setattr(sys, "argv", [name, "in.jsonl", "out.jsonl"])
    assert program.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{name}: error: ")
    assert "dllm-engine[ray]" in line


def test_a_batch_that_was_interrupted_goes_on_where_it_stopped(monkeypatch, capsys, tmp_path):
    pytest.importorskip("ray")
    program = load("ray_batch")
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": f"r{i}", "prompt": "x"}) + "\n" for i in range(10)))
    monkeypatch.setattr(sys, "argv", ["ray_batch", str(source), str(output)])

    def interrupted(args, options, lines):
        for line in reversed(lines[5:]):
            yield {"index": line.index, "text": "y"}
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "answer_on_replicas", interrupted)
    assert program.main() == 130
    whole = output.read_text().splitlines(keepends=True)
    output.write_text("".join(whole[:4]) + whole[4][:20])

    monkeypatch.setattr(
        program, "answer_on_replicas", lambda args, options, lines: [{"index": x.index, "text": "z"} for x in lines]
    )
    assert program.main() == 0
    assert "answered: 6, before: 4" in capsys.readouterr().err
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(r["index"], r["id"], r["text"]) for r in records] == [
        *((i, f"r{i}", "y") for i in (9, 8, 7, 6)),
        *((i, f"r{i}", "z") for i in range(6)),
    ]


def test_settings_become_a_deployment_and_the_servers_command(example):
    settings = {"model": "some/model", "min_replicas": "2", "max_replicas": "4", "target_requests": "8"}
    options = "--cache-method sparse --max-model-len 512"
    ingress = example.app(settings | {"options": options, "gpus_per_replica": "1"})._bound_deployment
    (replicas,) = ingress.init_args
    bound = replicas._bound_deployment
    config = bound._deployment_config
    assert (config.autoscaling_config.min_replicas, config.autoscaling_config.max_replicas) == (2, 4)
    assert config.max_ongoing_requests == 16
    assert bound.ray_actor_options == {"num_cpus": 1, "num_gpus": 1}
    command, threads = bound.init_args
    assert command[0] == "some/model"
    assert '{"dllm": {"cache_method": "sparse"}}' in command
    assert command[-2:] == ["--max-model-len", "512"]
    assert threads == 1


def test_wrong_options_are_told_in_one_line_before_ray_starts(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ray_serve_app", "--cache-method", "magic"])
    assert example.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ray_serve_app: error: ")
    assert "magic" in line


def ask(example, *replicas, content_type=b"text/event-stream"):
    """(status, body, replicas asked): each of ``replicas`` sends its chunks; None stands for its death."""
    from ray.exceptions import ActorDiedError
    from starlette.requests import Request

    asked = []

    class Handle:
        def options(self, **_):
            return self

        @property
        def answer(self):
            return self

        async def remote(self, scope, body):
            asked.append((scope["path"], body))
            for number, chunk in enumerate(replicas[len(asked) - 1]):
                if chunk is None:
                    raise ActorDiedError
                yield chunk if number else (200, [(b"content-type", content_type)], chunk)

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def answer():
        request = Request({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive)
        response = await example.Ingress(Handle())(request)
        if not hasattr(response, "body_iterator"):
            return response.status_code, response.body
        return response.status_code, b"".join([chunk async for chunk in response.body_iterator])

    status, body = asyncio.run(answer())
    assert asked == [("/v1/completions", b"{}")] * len(asked)
    return status, body, len(asked)


def test_a_request_whose_replica_dies_before_it_sends_is_answered_by_another_or_with_an_error(example):
    assert ask(example, [b"a", b"b"]) == (200, b"ab", 1)
    assert ask(example, [None], [None], [b"a", b"b"]) == (200, b"ab", 3)
    status, body, asked = ask(example, *[[None]] * example.ATTEMPTS)
    assert (status, asked) == (503, example.ATTEMPTS)
    assert "died" in json.loads(body)["error"]["message"]


def test_a_stream_whose_replica_dies_ends_with_an_error_event(example):
    status, body, asked = ask(example, [b"data: 1\n\n", None])
    assert (status, asked) == (200, 1)
    first, last = body.decode().strip().split("\n\n")
    assert first == "data: 1"
    assert "died" in json.loads(last.removeprefix("data: "))["error"]["message"]
    # A file is cut off.
    from ray.exceptions import ActorDiedError

    with pytest.raises(ActorDiedError):
        ask(example, [b"{", None], content_type=b"application/json")


def test_a_replica_sends_nothing_after_an_error_and_ends_if_its_engine_died(example, monkeypatch):
    def end(status):
        raise SystemExit(status)

    async def unfinished(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        raise RuntimeError("broken")

    class Replica(example.DiffusionServer):
        def __init__(self):
            self.application, self.engine = unfinished, SimpleNamespace(errored=False)

        def __del__(self):
            pass

    async def chunks():
        return [chunk async for chunk in replica.answer({"type": "http", "path": "/p"}, b"body")]

    monkeypatch.setattr(example.os, "_exit", end)
    replica = Replica()
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(chunks())
    replica.engine.errored = True
    with pytest.raises(SystemExit, match="1"):
        asyncio.run(chunks())
    with pytest.raises(SystemExit):
        asyncio.run(replica.check_health())
