"""Labelled questions: their file, their scores, and a calibration by them."""

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from dllm_engine.cli import calibrate, evaluate
from dllm_engine.cli.main import main
from dllm_engine.decisions.calibration import Calibration, Correction, Readings
from dllm_engine.decisions.questions import Option, Question
from dllm_engine.evaluation.calibrating import ALL, Measured, fit
from dllm_engine.evaluation.labelled_questions import (
    LabelledQuestion,
    is_labelled,
    read_labelled,
    scores_of,
)

CHOICE = {
    "type": "choice",
    "instructions": "Where does Tom live?",
    "choices": [{"value": "Rome"}, {"value": "Oslo"}, {"value": True}],
}
PREDICATE = {"type": "predicate", "instructions": "Tom lives in Rome."}


def line(question, answer, text="Tom lives in Oslo."):
    return json.dumps({"input": text, "question": question, "answer": answer})


def written(path, *lines):
    path.write_text("\n".join(lines))
    return path


def test_a_file_of_questions(tmp_path):
    score = {"type": "score", "instructions": "", "levels": [{"label": "a"}] * 2}
    lines = line(CHOICE, True), line(PREDICATE, False), line(score, 1)
    labelled = read_labelled(written(tmp_path / "q.jsonl", *lines))
    assert [each.answer for each in labelled] == [2, 1, 1]
    assert is_labelled(tmp_path / "q.jsonl")
    assert not is_labelled(
        written(tmp_path / "p.jsonl", '{"prompt": "", "answer": ""}')
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no questions"),
        ("nonsense", "line 1 must be"),
        (line(CHOICE, "Lima"), "line 1: answer: 'Lima' is none of the labels"),
        (line(PREDICATE, "yes"), "neither true nor false"),
        (line({"type": "choice"}, "a"), "question.instructions"),
        (line(PREDICATE, True, text=3), "line 1: input: "),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_labelled(written(tmp_path / "q.jsonl", content))


def test_scores():
    shares = [np.array([0.8, 0.2]), np.array([0.6, 0.4])]
    scores = scores_of(shares, [0, 1])
    assert scores.accuracy == 0.5
    assert scores.brier == pytest.approx((2 * 0.2**2 + 2 * 0.6**2) / 2)
    assert scores.log_loss == pytest.approx(-np.log([0.8, 0.4]).mean())
    assert scores.calibration_error == pytest.approx((0.2 + 0.6) / 2)


def drawn(rng, kind, *, factor=1.0, towards_first=0.0, prior=0.0):
    """A question whose answer has the probabilities that a model makes ``factor`` times
    too sure; with an input it prefers what is listed first, and in any case the
    second option.
    """
    labels = ("Yes", "No") if kind == "yes_no" else ("a", "b")
    options = tuple(Option(label) for label in labels)
    logits = rng.normal(0, 1, 2)

    def shares(about, order):
        bias = towards_first if about.any() else 0.0
        first = np.where(np.arange(2) == order[0], bias, 0.0)
        sure = np.exp(about * factor + first + [0.0, prior])
        return [*(sure / sure.sum())]

    orders = [(0, 1), (1, 0)] if kind == "choice" else [(0, 1)]
    both = [
        Readings(
            [shares(logits, order) for order in listed],
            [shares(np.zeros(2), order) for order in listed],
        )
        for listed in (orders, orders[::-1])
    ]
    right = np.exp(logits)
    answer = int(rng.random() > right[0] / right.sum())
    return LabelledQuestion([], Question(kind, "", options), answer), Measured(*both)


def test_a_correction_is_found_and_only_where_it_helps():
    rng = np.random.default_rng(0)
    pairs = [drawn(rng, "choice", factor=3.0) for _ in range(1000)]
    pairs += [drawn(rng, "yes_no") for _ in range(1000)]
    questions, measured = zip(*pairs, strict=True)
    fitted = fit(questions, measured, seed=1)
    choice = fitted.calibration.of("choice")
    assert choice.temperature == pytest.approx(3.0, rel=0.25)
    assert choice == Correction(choice.temperature)
    yes_no = fitted.calibration.of("yes_no")
    assert yes_no.temperature == pytest.approx(1.0, rel=0.25)
    assert yes_no == Correction(yes_no.temperature)
    for kind in ("choice", ALL):
        before, after = fitted.before[kind].scores, fitted.after[kind].scores
        assert after.log_loss < before.log_loss
        assert after.calibration_error < before.calibration_error
    sizes = [len(fitted.before[kind].scores.right) for kind in ("choice", "yes_no")]
    assert sum(sizes) == len(fitted.before[ALL].scores.right) == 1000
    assert fitted.before.keys() == {"choice", "yes_no", ALL}
    assert fitted.before["yes_no"].flips is None
    with pytest.raises(ValueError, match="19 questions are too few"):
        fit(questions[:19], measured[:19], seed=1)


def test_orders_and_the_prior_are_used_where_they_help():
    rng = np.random.default_rng(0)
    pairs = [drawn(rng, "choice", towards_first=2.0) for _ in range(400)]
    pairs += [drawn(rng, "yes_no", prior=2.0) for _ in range(400)]
    questions, measured = zip(*pairs, strict=True)
    fitted = fit(questions, measured, seed=1)
    assert fitted.calibration.of("choice").orders > 1
    assert fitted.calibration.of("yes_no").has_prior
    assert fitted.calibration.of("yes_no").orders == 1
    assert fitted.before["choice"].flips > 0.3
    assert fitted.after["choice"].flips == 0
    before, after = fitted.before[ALL].scores, fitted.after[ALL].scores
    assert after.accuracy > before.accuracy + 0.05


def test_answers_that_are_right_and_sure_stay_as_they_are():
    question = Question("yes_no", "", (Option("Yes"), Option("No")))
    sure = Readings([[0.9999, 0.0001]], [[0.5, 0.5]])
    asked = [LabelledQuestion([], question, 0)] * 100
    fitted = fit(asked, [Measured(sure, sure)] * 100, seed=1)
    assert not fitted.calibration.corrections


def test_readings_of_a_question():
    options = tuple(Option(label) for label in "abcdefgh")
    correction = Correction(orders=4, has_prior=True)
    readings = correction.readings(Question("choice", "", options))
    assert [each.order[0] for each in readings] == [0, 2, 4, 6] * 2
    assert [each.is_blank for each in readings] == [False] * 4 + [True] * 4
    orders = [
        each.order for each in correction.readings(Question("score", "", options[:3]))
    ]
    assert orders == [(0, 1, 2), (2, 1, 0)] * 2


def test_a_calibration_file_is_checked(tmp_path):
    file = tmp_path / "calibration.json"
    Calibration({"score": Correction(2.0)}).write(file)
    correction = Calibration.read(str(file)).of("score")
    shares = correction.applied(Readings([[0.8, 0.2]], []))
    assert shares == pytest.approx([2 / 3, 1 / 3])
    for content in ("[]", '{"score": {"temperature": 0}}', '{"score": {"x": 0}}'):
        with pytest.raises(ValueError, match="decision_calibration="):
            Calibration.read(str(written(tmp_path / f"{len(content)}.json", content)))


def test_commands_score_and_calibrate(demo, tmp_path, monkeypatch, capsys):
    """Texts that say where someone lives, some of which lie about Tom."""
    cities = ("Rome", "Oslo", "Paris", "Lima")
    choices = [{"value": city} for city in cities]
    question = {**CHOICE, "choices": choices}
    lines = [
        line(question, cities[i % 4 - i // 16], f"Tom lives in {cities[i % 4]}.")
        for i in range(20)
    ]
    file = written(tmp_path / "questions.jsonl", *lines)
    output = tmp_path / "calibration.json"
    monkeypatch.setattr(calibrate, "load", lambda arguments: demo)
    command = f"calibrate demo --questions {file} --output {output}".split()
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "CALIBRATION ERROR" in printed
    assert json.loads(output.read_text()).keys() <= {"choice"}
    assert output.with_suffix(".png").exists()
    answers = output.with_suffix(".answers.json")
    kept = json.loads(answers.read_text())
    assert len(kept["readings"]) == 20
    monkeypatch.setattr(evaluate, "load", lambda arguments: demo)
    scores = tmp_path / "scores.json"
    monkeypatch.setattr(demo.llm_engine.engine_core, "shutdown", lambda: None)
    assert main(f"eval --tasks {file} --output {scores}".split()) == 0
    (row,) = json.loads(scores.read_text())["rows"]
    assert row["result"]["score"] == pytest.approx(16 / 20)
    assert row["result"]["details"].keys() >= {"brier", "calibration_error"}
    # It goes on from what it has.
    part = json.dumps(kept | {"readings": kept["readings"][:8]})
    answers.write_text(part)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
        assert main(command) != 0
    assert answers.read_text() == part
    assert main(command) == 0
    assert json.loads(answers.read_text()) == kept
