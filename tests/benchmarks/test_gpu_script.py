"""``benchmarks/gpu.sh``, as far as it goes on a CPU."""

import json
import os
import subprocess

import pytest
import torch

from tests.support.checkout import CHECKOUT
from tests.support.preloaded import preloaded_programs


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_command_that_fails_does_not_stop_the_others(tmp_path):
    path = os.pathsep.join([str(preloaded_programs()), os.environ["PATH"]])
    ran = subprocess.run(
        [
            CHECKOUT / "benchmarks" / "gpu.sh",
            "--stages",
            "2",
            "--model",
            "llada-8b/32",
            "--output",
            tmp_path,
        ],
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ran.returncode == 1, ran.stdout
    assert "cuda_graphs=True needs a GPU" in ran.stdout
    figures = json.loads((tmp_path / "launched.json").read_text())["figures"]
    assert {(row["method"], row["kind"]) for row in figures} >= {
        ("none", "whole"),
        ("dual", "reuse"),
    }
    assert all(row["floor_over_step"] > 0 for row in figures)
    launched, recorded = (tmp_path / "summary.txt").read_text().splitlines()
    assert " ok " in launched
    assert " FAILED with exit status 1 " in recorded


def test_an_unknown_option_prints_what_there_is():
    ran = subprocess.run(
        [CHECKOUT / "benchmarks" / "gpu.sh", "--help"], capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert "benchmarks/gpu.sh [--output FOLDER]" in ran.stderr
    assert "set -euo" not in ran.stderr
