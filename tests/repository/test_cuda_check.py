"""What `scripts/cuda_check.py` says of its checks; the checks themselves need an environment of 8 GB."""

import json
import sys
from pathlib import Path

import cuda_check
import pytest


@pytest.fixture
def environment(tmp_path):
    made = cuda_check.CudaEnvironment(tmp_path)
    made.python = Path(sys.executable)
    return made


@pytest.fixture
def run(environment, monkeypatch, capsys):
    """Runs the command with these checks; returns its exit status and what it prints."""
    monkeypatch.setattr(cuda_check.CudaEnvironment, "install", lambda self: None)

    def run(checks, *arguments):
        monkeypatch.setattr(cuda_check.CudaEnvironment, "checks", lambda self, module, *rest: iter(checks[module]))
        return cuda_check.main(["--venv", str(environment.directory), *arguments]), capsys.readouterr().out

    return run


def check(name, result="ok", **fields):
    return {"name": name, "case": "bfloat16", "result": result, "reason": "", "seconds": 1.0} | fields


def test_a_process_that_ends_early_is_a_failure_and_its_log_says_why(environment):
    (failure,) = environment.checks("no_such_module")
    assert failure["result"] == "FAILED"
    assert "status 1" in failure["reason"]
    assert "no_such_module" in failure["reason"].partition("\n")[2]


def test_a_failure_leaves_the_other_checks_their_lines(run, tmp_path):
    used = [{"kernel": "a", "registers": 9, "shared_memory": 2048, "spilled": 8}]
    spills = check("rotate_", "FAILED", error=8.0, bound=0.0, kernels=[*used, used[0] | {"registers": 255}])
    checks = {"worker": [check("worker", "FAILED", reason="ValueError: no")], "kernels": [spills, check("voting")]}
    status, printed = run(checks, "--capability", "80", "120", "--output", str(tmp_path / "found.json"))
    assert status == 1
    assert printed.count("\nFAILED") == 3
    assert "FAILED   sm_120 rotate_, bfloat16" in printed
    assert "255   2.0 KiB     8 B" in printed
    assert "8, and at most 0 are allowed" in printed
    assert "ok       sm_120 voting" in printed
    assert "not run  CUDA graphs" in printed
    assert len(json.loads((tmp_path / "found.json").read_text())["checks"]) == 5 + len(cuda_check.NEEDS_A_GPU)


def test_what_passes_is_no_failure_though_some_cannot_run(run):
    status, printed = run({"kernels": [check("rotate_")]}, "--only", "kernels", "--capability", "90")
    assert status == 0
    assert f"1 ok, 0 failed, {len(cuda_check.NEEDS_A_GPU)} not run" in printed


def test_a_gpu_whose_limits_are_not_known_is_refused(run, capsys):
    with pytest.raises(SystemExit):
        run({}, "--capability", "75")
    assert "80, 86, 90, 100, 120" in capsys.readouterr().err
