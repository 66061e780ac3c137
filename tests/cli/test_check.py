"""``dllm check`` sees what is wrong, and says where.

The stored answers are those of a CPU. To write them anew: ``python -m tests.cli.test_check``
"""

import json
import os
import re
from contextlib import contextmanager

import pytest
import torch

from dllm_engine.check import answers, operators
from dllm_engine.check.answers import ANSWERS, CACHE_OPTIONS, SETTINGS, answers_of, demo_for, running
from dllm_engine.check.checks import FAILED, OK, CannotRunError, Check, as_table, compare, run_checks
from dllm_engine.check.operators import Sizes, operator_checks
from dllm_engine.cli.main import main
from dllm_engine.kernels.slots import write_slots
from dllm_engine.kernels.voting import voting_scores
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.text import json_rows
from tests.support.kernels import all_operators

SIZES = Sizes(num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=64, vocab_size=150, slots_per_page=16)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def not_quiet(monkeypatch):
    """It would quiet the whole session."""
    monkeypatch.setattr("dllm_engine.cli.check.be_quiet", lambda: None)


@pytest.fixture
def one_engine(engines, monkeypatch):
    """Of one cache method, and the session's: one that ends takes vLLM's process groups from the others."""

    @contextmanager
    def shared(method, **settings):
        yield engines(
            demo_for(method), cache_method=method, cache_options=CACHE_OPTIONS.get(method), **SETTINGS | settings
        )

    monkeypatch.setattr(answers, "running", shared)


def rows_of(printed, name):
    return [line for line in printed.splitlines() if line.startswith(f"{name} ")]


def test_a_run_prints_a_table_and_writes_all_of_it(one_engine, tmp_path, capsys):
    output = tmp_path / "check.json"
    assert main(["check", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    for name, cases, result in (
        ("voting_scores", "18 cases", OK),
        ("answers, two ranks", "", "not run: there is one device"),
        ("answers", f"{len(CACHE_METHODS)} cases", OK),
    ):
        (row,) = rows_of(printed, name)
        assert cases in row
        assert row.endswith(result)
    assert f"wrote {output}" in printed
    report = json.loads(output.read_text())
    machine = {"processor", "driver", "compute_capability", "python", "torch", "triton", "vllm"}
    assert machine <= report["machine"].keys()
    assert report["sizes"]["head_dim"] == 32
    assert {"answers", "noise", "write_slots"} <= {check["name"] for check in report["checks"]}


def test_a_kernel_that_is_wrong_in_one_type_fails_the_line_that_names_it(monkeypatch, capsys):
    plain = voting_scores.kernel

    def wrong_in_float16(q, k, lse):
        scores = plain(q, k, lse)
        if q.dtype == torch.float16:
            scores[-1, -1] *= 1.01
        return scores

    def raises_in_bfloat16(values, pages, slots):
        if values.dtype == torch.bfloat16:
            raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(voting_scores, "kernel", wrong_in_float16)
    monkeypatch.setattr(write_slots, "kernel", raises_in_bfloat16)
    monkeypatch.setattr(operators, "HEAD_DIMS", ())
    monkeypatch.setattr(answers, "answer_checks", lambda device: [])
    assert main(["check"]) == 1
    printed = capsys.readouterr().out
    first, wrong, last = rows_of(printed, "voting_scores")
    assert " float16, 4 heads of 32 share 4 " in wrong
    assert [row.endswith(FAILED) for row in (first, wrong, last)] == [False, True, False]
    assert rows_of(printed, "write_slots")[-1].endswith("FAILED: RuntimeError: no kernel image")
    assert "2 failed" in printed


def test_what_was_found_is_written_before_the_process_ends(monkeypatch, tmp_path):
    def end(*arguments):
        raise SystemExit

    monkeypatch.setattr(voting_scores, "kernel", end)
    output = tmp_path / "check.json"
    with pytest.raises(SystemExit):
        main(["check", "llada-8b/32", "--only", "kernels", "--output", str(output)])
    report = json.loads(output.read_text())
    assert report["sizes"]["head_dim"] == 128
    assert [check["result"] for check in report["checks"] if check["name"] == "write_slots"] == [OK] * 3


def test_heads_of_other_sizes_alone(monkeypatch, capsys):
    monkeypatch.setattr(operators, "HEAD_DIMS", (16, 32))  # the demo model's are of 32
    assert main(["check", "--only", "heads"]) == 0
    printed = capsys.readouterr().out
    assert "4 heads of 16 share 2" in printed
    assert "heads of 32" not in printed
    assert not rows_of(printed, "noise") + rows_of(printed, "answers")


def test_an_engine_that_answers_otherwise_fails(one_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "METHODS", ["sparse"])
    stored = json.loads(ANSWERS.read_text())
    stored["sparse"][1]["logprobs"][5] += 0.01
    monkeypatch.setattr(answers, "ANSWERS", tmp_path / "answers.json")
    answers.ANSWERS.write_text(json.dumps(stored))
    (outcome, *_) = run_checks(answers.answer_checks(CPU))
    assert outcome.result == FAILED
    assert outcome.error == pytest.approx(0.01, abs=1e-3)
    stored["sparse"][1]["tokens"][5] += 1
    answers.ANSWERS.write_text(json.dumps(stored))
    (outcome, *_) = run_checks(answers.answer_checks(CPU))
    assert outcome.reason.startswith("ValueError: the answer's tokens are [")
    assert "_compare" in outcome.traceback


def test_answers_of_every_method_are_stored_and_tell_most_of_them_apart():
    stored = json.loads(ANSWERS.read_text())
    assert stored.keys() == CACHE_METHODS.keys()
    assert len({str(answer) for answer in stored.values()}) == len(stored)


def test_every_operator_with_a_triton_kernel_is_checked():
    names = {name for name, operator in all_operators().items() if operator._triton}
    checks = list(operator_checks(CPU, SIZES))
    assert names <= {check.name.split(",")[0] for check in checks}
    for name in names:
        cases = {check.case.split(",")[0] for check in checks if check.name.startswith(name)}
        assert cases == {"float32", "float16", "bfloat16"}


def test_the_error_is_the_largest_difference_over_the_largest_number():
    inf, nan = torch.inf, torch.nan
    cases = [([1.0, 2.0], [1.0, 2.0], 0.0), ([1.0, 2.0], [1.0, 4.0], 0.5), ([3, 4], [3, 5], 0.2)]
    cases += [([-inf, nan], [-inf, nan], 0.0), ([inf, 1.0], [1.0, 1.0], inf)]
    for actual, expected, error in cases:
        assert compare([torch.tensor(actual)], [torch.tensor(expected)])[0] == pytest.approx(error)


def test_numbers_that_are_none_fail_and_so_do_other_shapes():
    def outcome(actual):
        check = Check("sum", "float32", lambda: compare([torch.ones(2), actual], [torch.ones(2), torch.ones(2)]))
        return next(run_checks([check]))

    assert outcome(torch.ones(2)).result == OK
    assert outcome(torch.tensor([1.0, torch.nan])).reason == "NaN where a number is expected"
    assert outcome(torch.ones(3)).reason == "ValueError: the shape is [3], not [2]"


def test_the_table_has_a_line_per_failure_and_one_for_what_went_well():
    def absent():
        raise CannotRunError("needs a GPU")

    runs = [lambda: (1e-6, 1e-5), lambda: (1e-4, 1e-2), lambda: (1e-1, 1e-2), absent, absent]
    table = as_table(run_checks(Check("sum", f"case {i}", run) for i, run in enumerate(runs)))
    cells = [re.split(r"\s{2,}", line) for line in table.splitlines()[1:]]
    assert [row[:2] + row[-1:] for row in cells] == [
        *(["sum", "2 cases, case 0", OK], ["sum", "case 2", FAILED], ["sum", "2 cases", "not run: needs a GPU"])
    ]


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    made = {}
    for method in CACHE_METHODS:
        with running(method) as llm:
            made[method] = answers_of(llm)
    ANSWERS.write_text(json_rows(made, depth=3) + "\n", encoding="utf-8")
