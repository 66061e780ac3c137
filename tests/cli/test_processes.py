"""Commands that need a process of their own: one that is interrupted, and engines that
end.

The commands themselves run as printed in ``tests/docs/test_snippets.py``.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support.preloaded import preloaded_programs, wait_until

pytestmark = pytest.mark.slow

PROMPT = "Tom=48. Ida=07. Max=31. Give: Ida, Tom"
TIMEOUT = 300


ENVIRONMENT = {
    key: value for key, value in os.environ.items() if not key.startswith("VLLM_")
}
"""As a newcomer's: nothing set that this session's own engines need."""


def is_running(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_while_loading_is_one_line_and_leaves_no_process(tmp_path):
    """A process, since Python raises Ctrl-C in its main thread alone; two ranks, for
    the engine's own processes.
    """
    log = tmp_path / "stderr"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "dllm_engine.cli.main",
                "generate",
                PROMPT,
                "--tensor-parallel-size",
                "2",
            ],
            cwd=tmp_path,
            env=ENVIRONMENT
            | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: b"Initializing a V1 LLM engine" in log.read_bytes(),
            TIMEOUT,
            process,
            log,
        )
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output, _ = process.communicate(timeout=TIMEOUT)
        wait_until(
            lambda: not is_running(process.pid), 30
        )  # what it interrupts ends after it
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert output == b""
    assert log.read_text().count("dllm: interrupted\n") == 1


def test_bench_measures_one_engine_after_the_other(tmp_path):
    program = """if True:
        import sys, weakref
        from dllm_engine.cli import bench
        from dllm_engine.cli.main import main
        from dllm_engine.evaluation.runner import runner_of
        started, load = [], bench.random_engine

        def load_and_watch(*arguments, **settings):
            assert not any(model() for model in started), "an engine that was stopped still holds its weights"
            llm = load(*arguments, **settings)
            started.append(weakref.ref(runner_of(llm).model))
            return llm

        bench.random_engine = load_and_watch
        sys.exit(main(sys.argv[1:]))
    """
    small = (
        "--model llada-8b/16 --methods none,dual --batch 2 --response 16 --repeats 1"
    ).split()
    (tmp_path / "watched_dllm.py").write_text(program)
    command = [
        str(preloaded_programs() / "python"),
        "watched_dllm.py",
        "bench",
        "--quick",
        *small,
        "--output",
        "bench.json",
    ]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert {(row["method"], row["unmasking"]) for row in rows} == {
        (method, rule)
        for method in ("none", "dual")
        for rule in ("one", "tokens_per_step=4")
    }
    assert all(row["result"]["score"] > 0 for row in rows)
