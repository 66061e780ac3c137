"""The decisions task of ``dllm eval``."""

import json

import pytest

from dllm_engine.cli.main import main
from dllm_engine.evaluation.decision_tasks import demo_questions, reliability


def test_questions_offer_the_right_value():
    questions = demo_questions(5, seed=3, as_json=False)
    assert len(questions) == 15
    for question in questions:
        assert question.values
        assert question.choices.keys() == question.values.keys()
        assert question.values_in(question.template.format(**question.values)) == question.values
        for name, value in question.values.items():
            assert value in question.choices[name]
            assert f"{name}={value}." in question.prompt or f"{name} lives in {value}." in question.prompt


def test_reliability():
    bins = reliability([0.05, 0.15, 0.19, 1.0], [0.0, 1.0, 0.0, 1.0])
    assert bins == [(0.05, 0.0, 1), (pytest.approx(0.17), 0.5, 2), (1.0, 1.0, 1)]


@pytest.mark.slow  # a process for each engine
def test_decisions_beside_generated_text(tmp_path, capsys):
    output = tmp_path / "decisions.json"
    rules = "passes=1,passes=2,threshold=0.9"
    asked = ["eval", "--tasks", "decisions,decisions-json", "--count", "2", "--unmasking-rules", rules]
    asked += ["--output", str(output)]
    assert main(asked) == 0, capsys.readouterr().err
    rows = json.loads(output.read_text())["rows"]
    assert [row["unmasking"] for row in rows[::2]] == rules.split(",")
    assert next(row["cost"]["forward_passes"] / row["cost"]["requests"] for row in rows) == 1
    assert 0 <= rows[0]["result"]["details"]["calibration_error"] <= 1
    assert "reliability" not in rows[-1]["result"]["details"]
    assert (tmp_path / "decisions.reliability.png").exists()
