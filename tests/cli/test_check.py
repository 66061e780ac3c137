"""``dllm check`` sees what is wrong, and says where.

The stored answers are those of a CPU. To write them anew: ``python -m
tests.cli.test_check``
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from dllm_engine import LLM
from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.check import cases, checks
from dllm_engine.check.checks import (
    ANSWERS,
    FAILED,
    OK,
    answers_of,
    compare,
    outcome_of,
)
from dllm_engine.cli import check as command
from dllm_engine.cli.main import main
from dllm_engine.kernels.pages import write_kv
from dllm_engine.kernels.rotary import rotate_
from tests.kernels.checks import all_operators


@pytest.fixture(autouse=True)
def not_quiet(monkeypatch):
    """It would quiet the whole session."""
    monkeypatch.setattr("dllm_engine.cli.check.be_quiet", lambda: None)


@pytest.fixture
def shared_engines(engines, monkeypatch):
    """The session's engines: one that ends takes vLLM's process groups
    from the others.
    """

    def start(model, **settings):
        with monkeypatch.context() as patch:
            patch.setattr("dllm_engine.llm.LLM", LLM)
            llm = engines(model, **settings)
        monkeypatch.setattr(llm.llm_engine.engine_core, "shutdown", lambda: None)
        return llm

    monkeypatch.setattr("dllm_engine.llm.LLM", start)


@pytest.fixture
def few_cases(monkeypatch):
    """Attention to few pages, and heads of one other size."""
    monkeypatch.setattr(cases, "PAGED", (([3, 1], [40, 17]), ([20], [70])))
    monkeypatch.setattr(command, "HEAD_DIMS", (16, 32))  # the demo model's are of 32


def rows_of(printed, name):
    return [line for line in printed.splitlines() if line.startswith(f"{name} ")]


def test_a_run_prints_a_table_and_writes_all_of_it(
    shared_engines, few_cases, tmp_path, capsys
):
    output = tmp_path / "check.json"
    assert main(f"check --output {output}".split()) == 0
    printed = capsys.readouterr().out
    for name, number in {
        "voting_scores, summed_probabilities": 3,
        "answers": len(CACHE_METHODS.own),
    }.items():
        rows = rows_of(printed, name)
        assert f"{number} cases" in rows[0]
        assert all(row.endswith(OK) for row in rows)
    assert " 4 heads of 16 share 2 " in printed
    assert f"wrote {output}" in printed
    report = json.loads(output.read_text())
    assert {
        "processor",
        "driver",
        "compute_capability",
        "torch",
        "triton",
        "vllm",
    } <= report["machine"].keys()
    assert report["sizes"]["head_dim"] == 32
    assert {"answers", "rotate_"} <= {check["name"] for check in report["checks"]}


def test_a_kernel_that_is_wrong_in_one_type_fails_the_line_that_names_it(
    few_cases, monkeypatch, capsys
):
    plain = rotate_.cpu

    def wrong_in_float16(x, *arguments):
        plain(x, *arguments)
        if x.dtype == torch.float16:
            x[-1, -1] *= 1.1

    def raises_in_bfloat16(values, *arguments):
        if values.dtype == torch.bfloat16:
            raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(rotate_, "cpu", wrong_in_float16)
    monkeypatch.setattr(write_kv, "cpu", raises_in_bfloat16)
    assert main("check --only kernels".split()) == 1
    printed = capsys.readouterr().out
    first, wrong, last = rows_of(printed, "rotate_")
    assert " float16, 4 heads of 32 share 4 " in wrong
    assert [row.endswith(FAILED) for row in (first, wrong, last)] == [
        False,
        True,
        False,
    ]
    assert rows_of(printed, "write_kv, replace_and_compare, choose_least_similar")[
        -1
    ].endswith("FAILED: RuntimeError: no kernel image is available")
    assert "2 failed" in printed


def test_an_engine_that_answers_otherwise_fails(shared_engines, tmp_path, monkeypatch):
    stored = json.loads(ANSWERS.read_text())
    stored["block"][1][0][5] += 1
    monkeypatch.setattr(checks, "ANSWERS", tmp_path / "answers.json")
    checks.ANSWERS.write_text(json.dumps(stored))
    outcome = outcome_of(*next(checks.answer_checks("cpu")))
    assert (outcome["result"], outcome["error"]) == (FAILED, 1)


def test_every_operator_with_a_triton_kernel_is_checked():
    names = ", ".join(cases.BY_HEADS | cases.OTHERS)
    assert all(name in names for name in all_operators())


def test_kernels_work_on_a_cpu_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch
from dllm_engine.check.cases import BY_HEADS, OTHERS, Draw, Sizes
from dllm_engine.kernels.token_statistics import token_statistics
for case in (BY_HEADS | OTHERS).values():
    case(Draw(Sizes(4, 2, 32, 64, 150, 8), torch.float32, torch.float32, "cpu"))
try:
    token_statistics.triton
except ImportError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "need Triton" in ran.stdout


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([3, 4], [3, 5], 0.2),
        ([-torch.inf, torch.nan], [-torch.inf, torch.nan], 0.0),
        ([torch.inf, 1.0], [1.0, 1.0], torch.inf),
        ([1.0, torch.nan], [1.0, 1.0], torch.inf),
    ],
)
def test_the_error_is_the_largest_difference_over_the_largest_number(
    actual, expected, error
):
    assert compare([torch.tensor(actual)], [torch.tensor(expected)])[
        0
    ] == pytest.approx(error)


def test_other_shapes_fail():
    outcome = outcome_of("sum", "", lambda: compare([torch.ones(3)], [torch.ones(2)]))
    assert (outcome["result"], outcome["reason"]) == (
        FAILED,
        "ValueError: the shape is [3], not [2]",
    )


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    ANSWERS.write_text(
        json.dumps({name: answers_of(name) for name in CACHE_METHODS.own}) + "\n",
        encoding="utf-8",
    )
