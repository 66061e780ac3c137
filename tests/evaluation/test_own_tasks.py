"""Tasks that need no lm_eval: files, when a response is right, and decisions."""

import json

import pytest

from dllm_engine.cli.main import main
from dllm_engine.demo.tasks import TASKS
from dllm_engine.evaluation.labelled_questions import reliability
from dllm_engine.evaluation.own_tasks import (
    DEMO_TASKS,
    MATCHES,
    demo_questions,
    demo_tasks,
    read_tasks,
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n", "holds no tasks"),
        ("nonsense", "task 1 must be"),
        ("caf\udce9", "tasks.jsonl: task 1 must be .* Invalid JSON"),
        (
            '{"prompt": "x", "answer": "y"}\n\n{"prompt": "x"}',
            "task 3 must be .* answer: Field required",
        ),
        ('{"answer": "x"}', "prompt: Field required"),
        ('{"prompt": "x", "answer": 3}', "answer: Input should be a valid string"),
        (
            '{"prompt": 3, "answer": "x"}',
            "prompt: Input should be a valid string; prompt: Input",
        ),
    ],
)
def test_a_line_that_is_no_task_is_named(tmp_path, content, message):
    file = tmp_path / "tasks.jsonl"
    file.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        read_tasks(file)


@pytest.mark.parametrize(
    ("match", "response", "answer", "is_right"),
    [
        ("exact", " Oslo\n", "Oslo", True),
        ("exact", "Oslo.", "Oslo", False),
        ("contains", "It is Oslo.", "Oslo", True),
        ("contains", "It is Rome.", "Oslo", False),
        ("last-number", "4 + 5 = 9, so $1,009.0.", "He has 1,009\n#### 1009", True),
        ("last-number", "It is -3.", "3", False),
        ("last-number", "no idea", "3", False),
        ("last-number", "no idea", "none either", False),
    ],
)
def test_matches(match, response, answer, is_right):
    assert MATCHES[match](response, answer) is is_right


def test_an_unknown_task_is_refused_with_all_that_there_are():
    with pytest.raises(
        ValueError, match=r"unknown task 'nams'; did you mean 'names'\?"
    ) as error:
        demo_tasks("nams", 1, 0)
    for name in (DEMO_TASKS, *TASKS, "FILE.jsonl", "--lm-eval"):
        assert name in str(error.value)


def test_questions_offer_the_right_value():
    questions = demo_questions(5, seed=3, as_json=False)
    assert len(questions) == 15
    for question in questions:
        assert question.values
        assert question.choices.keys() == question.values.keys()
        assert set(question.scores(question.template.format(**question.values))) == {
            1.0
        }
        assert set(question.scores("")) == {0.0}
        wrong = {
            name: next(c for c in question.choices[name] if c != right)
            for name, right in question.values.items()
        }
        (first, *_), others = question.values, [1.0] * (len(question.values) - 1)
        assert question.scores(
            question.template.format(**question.values | {first: wrong[first]})
        ) == [0.0, *others]
        for name, value in question.values.items():
            assert value in question.choices[name]
            assert (
                f"{name}={value}." in question.prompt
                or f"{name} lives in {value}." in question.prompt
            )


def test_reliability():
    bins = reliability([0.05, 0.15, 0.19, 1.0], [0.0, 1.0, 0.0, 1.0])
    assert bins == [(0.05, 0.0, 1), (pytest.approx(0.17), 0.5, 2), (1.0, 1.0, 1)]


# Its engine ends, and takes vLLM's process groups from all others of the process.
@pytest.mark.slow
def test_decisions_beside_generated_text(tmp_path, capsys):
    output = tmp_path / "decisions.json"
    rules = "passes=1,passes=2,threshold=0.9"
    asked = [
        "eval",
        "--tasks",
        "decisions,decisions-json",
        "--count",
        "1",
        "--unmasking-rules",
        rules,
    ]
    assert main([*asked, "--output", str(output)]) == 0, capsys.readouterr().err
    rows = json.loads(output.read_text())["rows"]
    assert [row["unmasking"] for row in rows[::2]] == rules.split(",")
    assert rows[0]["cost"]["forward_passes"] == rows[0]["cost"]["requests"]
    assert 0 <= rows[0]["result"]["details"]["calibration_error"] <= 1
    assert "reliability" not in rows[-1]["result"]["details"]
    assert (tmp_path / "decisions.reliability.png").exists()
