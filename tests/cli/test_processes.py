"""What needs a process of its own: commands that are killed or interrupted, and engines that end.

The commands themselves run as printed in ``tests/docs/test_snippets.py``.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.preloaded import Program, preloaded_programs

pytestmark = pytest.mark.slow

PROMPT = "Tom=48. Ida=07. Max=31. Give: Ida, Tom"
TIMEOUT = 300


@pytest.fixture
def environment(tmp_path):
    """As a newcomer's: nothing set that this session's own engines need."""
    return {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}


@pytest.fixture
def run(environment, tmp_path):
    def start(*command):
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )

    return start


def test_a_killed_run_is_resumed_to_one_record_per_line(run, environment, tmp_path):
    prompts = [json.dumps({"prompt": PROMPT, "id": i}) for i in range(24)]
    (tmp_path / "in.jsonl").write_text("\n".join([*prompts, "not JSON"]) + "\n")
    output = tmp_path / "out.jsonl"
    # A request at a time, through all of its blocks: enough time to be killed in between.
    command = [Path(sys.executable).with_name("dllm"), "generate", "--input", "in.jsonl", "--output", "out.jsonl"]
    command += ["--ignore-eos", "--engine-arg", "max_num_seqs=1"]

    with (tmp_path / "stderr").open("wb") as log:
        process = Program(command, cwd=tmp_path, env=environment, stderr=log)
    try:
        wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 5, process)
    finally:
        process.kill()
        process.wait(TIMEOUT)  # until it has ended, and with it its lock on the output
    kept = output.read_bytes().splitlines(keepends=True)
    assert 5 <= len(kept) < 25
    with output.open("ab") as file:  # the kill may have come amid a line as well
        file.write(kept[0][:-10])

    result = run(preloaded_programs() / "dllm", *command[1:])
    assert result.returncode == 1, result.stderr
    assert "errors: 1" in result.stderr
    lines = output.read_bytes().splitlines(keepends=True)
    assert lines[: len(kept)] == kept
    records = [json.loads(line) for line in lines]
    assert sorted(record["index"] for record in records) == list(range(25))
    answers = [record for record in records if "error" not in record]
    assert [record["id"] for record in answers] == [record["index"] for record in answers]
    assert {tuple(record["token_ids"]) for record in answers} == {tuple(answers[0]["token_ids"])}


def test_ctrl_c_while_loading_is_one_line_and_leaves_no_process(environment, tmp_path):
    """A process, since Python raises Ctrl-C in its main thread alone; two ranks, for the engine's own processes."""
    log = tmp_path / "stderr"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "dllm_engine.cli.main", "generate", PROMPT, "--tensor-parallel-size", "2"],
            cwd=tmp_path,
            env=environment | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        wait_until(lambda: b"Initializing a V1 LLM engine" in log.read_bytes(), process)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail("processes of the engine are left")
    assert process.returncode == 130
    assert output == b""
    assert log.read_text().count("dllm: interrupted\n") == 1


def test_bench_measures_methods_one_by_one_each_with_a_baseline_on_two_models(run, tmp_path):
    """More engines than the memory holds side by side; here it is said to be short. Engines that end need a process of
    their own."""
    pytest.importorskip("matplotlib")
    program = """if True:
        import sys, weakref
        from dllm_engine.bench import benchmark
        from dllm_engine.bench.subject import Subject
        from dllm_engine.cli.main import main
        started, start = [], Subject.start

        def start_and_watch(*arguments):
            assert not any(model() for model in started), "an engine that was stopped still holds its weights"
            llm = start(*arguments)
            started.append(weakref.ref(benchmark.runner_of(llm).model))
            return llm

        benchmark.available, Subject.start = lambda: 0, start_and_watch
        sys.exit(main(sys.argv[1:]))
    """
    small = ["--methods", "none,dual", "--batch", "2", "--response", "16", "--repeats", "1"]
    (tmp_path / "watched_dllm.py").write_text(program)
    result = run(preloaded_programs() / "python", "watched_dllm.py", "bench", "--quick", *small)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for about in ("demo (checkpoint weights", "llada-8b/16 (random weights"):
        assert any(line.startswith(about) for line in lines)
    for measured in json.loads((tmp_path / "bench.json").read_text())["runs"]:
        assert measured["groups"] == [["none"], ["dual"]]
        assert {(cell["method"], cell["group"]) for cell in measured["cells"]} == {
            ("plain", 0), ("none", 0), ("plain", 1), ("dual", 1)
        }  # fmt: skip
        for cell in measured["cells"]:
            if cell["method"] != "plain":
                assert cell["tokens_per_second"] > 0
                assert cell["whole"]["floor_seconds"] > 0
    plots = sorted(file.name for file in (tmp_path / "bench-plots").iterdir())
    assert plots == ["bench-demo.png", "bench-llada-8b-16.png"]


def wait_until(condition, process):
    """Until ``condition`` holds; fails as soon as ``process`` has ended."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, f"ended with status {process.returncode}"
        assert time.monotonic() < end, "still not there"
        time.sleep(0.05)
