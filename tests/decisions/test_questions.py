"""Questions in both protocols, without an engine."""

import numpy as np
import pytest

from dllm_engine.decisions import openai_form, systemone_form
from dllm_engine.decisions.questions import (
    Answer,
    Option,
    Question,
    QuestionError,
    answered,
)


def question(kind, *labels):
    return Question(kind, "", tuple(Option(label) for label in labels))


@pytest.mark.parametrize(
    ("kind", "shares", "confidence"),
    [
        ("choice", (1.0,), 1.0),
        ("choice", (0.25,) * 4, 0.0),
        ("choice", (0.7, 0.2, 0.1), 0.55),
        ("score", (0.04, 0.96, 0.0), 0.94),
        ("score", (0.5, 0.0, 0.5), 0.0),
        ("score", (0.25,) * 4, 0.0),
    ],
)
def test_confidence_goes_from_nothing_to_certainty(kind, shares, confidence):
    answer = Answer(question(kind, *map(str, range(len(shares)))), shares, 1.0)
    assert answer.confidence == pytest.approx(confidence, abs=0.005)


def test_an_answer_is_the_first_of_equals_and_a_score_the_expectation():
    typed = question("choice", "true", True, "x")
    assert answered(typed, [1, 1, 0], 0.5).value == "true"
    assert answered(typed, [1, 2, 0], 0.5).value is True
    score = answered(question("score", *"abc"), [1, 1, 2], 2.0)
    assert (score.score, score.value, score.label_mass) == (1.25, 2, 1.0)
    assert answered(question("yes_no", "Yes", "No"), [1, 3], 0.5).value is False
    assert score.probabilities == (0.25, 0.25, 0.5)


def test_labels_that_look_alike_are_written_as_json():
    assert question("choice", "a", True).labels == ["a", "true"]
    assert question("choice", "true", True).labels == ['"true"', "true"]
    assert question("choice", "", "ä").labels == ['""', '"ä"']
    assert question("score", "a", "a").labels == ['0: "a"', '1: "a"']


def test_openai_input_becomes_messages():
    items = [
        {"role": "developer", "content": "be brief"},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "see"},
                {"type": "input_json", "data": {"ä": [1, None]}},
            ],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "done"},
        {"type": "custom_tool_call", "call_id": "1", "name": "g", "input": "x"},
    ]
    messages = openai_form.read_input(items)
    roles = " ".join(message["role"] for message in messages)
    assert roles == "system user assistant assistant user assistant"
    assert messages[1]["content"] == 'see\n{"ä":[1,null]}'
    assert '"arguments": "{}"' in messages[3]["content"]
    assert "done" in messages[4]["content"]


CHOICE = {"type": "choice", "instructions": "", "choices": [{"value": "a"}]}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [{}] * 401}, "questions"),
        ({"questions": [CHOICE]}, "questions[0].choices"),
        ({"questions": [{"type": "noul"}]}, "questions[0].type"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
        ({"questions": [{**CHOICE, "x": 1}]}, "questions[0].x"),
        ({"questions": [{**CHOICE, "choices": [{"value": 1}] * 2}]}, "].value"),
        (
            {"questions": [{**CHOICE, "choices": [{"value": "a", "x": 1}] * 2}]},
            "questions[0].choices[0].x",
        ),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]}, "choices"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role"),
        (
            {"input": [{"role": "system", "content": [{"type": "input_json"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "1"}]},
            "input[0].call_id",
        ),
        *(
            ({"input": [{"type": "function_call", "call_id": [], **item}]}, path)
            for item, path in (
                ({}, "input[0].call_id"),
                ({"type": "custom_tool_call_output"}, "input[0].call_id"),
                ({"type": []}, "input[0].type"),
                ({"type": "message", "role": {}}, "input[0].role"),
            )
        ),
        ({"input": None}, "input"),
        ({"temperature": 1}, "temperature"),
        ({"safety_identifier": "x" * 129}, "safety_identifier"),
    ],
)
def test_openai_bodies_are_refused_where_they_are_wrong(change, path):
    body = {"model": "m", "input": "text", "questions": []} | change
    if "questions" not in change:
        body["questions"] = [{"type": "predicate", "instructions": "so?"}]
    with pytest.raises(QuestionError) as refused:
        openai_form.read_request(body)
    error = refused.value
    assert error.path.endswith(path)
    assert "Unknown" not in error.message or f"'{error.path}'" in error.message


def test_input_json_has_limits():
    deep = {}
    for _ in range(32):
        deep = {"a": deep}
    for data in (deep, {"a": [0] * 10_001}, {"a": "x" * (256 << 10)}, [1], "text"):
        content = [{"type": "input_json", "data": data}]
        with pytest.raises(QuestionError, match=r"At most|Expected an object"):
            openai_form.read_input([{"role": "user", "content": content}])


def test_systemone_questions():
    (message,), (noul, choice, score) = systemone_form.read_request(
        {
            "state": {"ä": 1},
            "questions": {
                "n": {"type": "noul", "criteria": {"true": {"k": 1}, "false": None}},
                "c": {"type": "choice", "criteria": {"b": None, "a": "first"}},
                "s": {"type": "score", "instructions": ["x"], "criteria": ["low"]},
            },
            "unknown": 1,
        }
    )
    assert message == {"role": "user", "content": '{"ä": 1}'}
    assert noul.options[0].description == '{"k": 1}'
    assert [option.label for option in choice.options] == ["b", "a"]
    assert score.instructions == '["x"]'


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"state": None}, ("state",)),
        ({"assets": {}}, ("assets",)),
        ({"questions": {}}, ("questions",)),
        ({"questions": {"": {"type": "noul"}}}, ("questions", "")),
        ({"questions": {"a": {"type": "predicate"}}}, ("questions", "a", "type")),
        (
            {"questions": {"a": {"type": "noul"}}},
            ("questions", "a", "noul", "criteria"),
        ),
        (
            {"questions": {"a": {"type": "score", "criteria": [None]}}},
            ("questions", "a", "score", "criteria", 0),
        ),
        (
            {"questions": {"a": {"type": "score", "criteria": ["a"] * 11}}},
            ("questions", "a", "score", "criteria"),
        ),
        (
            {"questions": {"a": {"type": "choice", "criteria": ["a"]}}},
            ("questions", "a", "choice", "criteria"),
        ),
    ],
)
def test_systemone_bodies_are_refused_where_they_are_wrong(change, place):
    asked = {"state": "", "questions": {"a": {"type": "noul", "instructions": "x"}}}
    with pytest.raises(QuestionError) as refused:
        systemone_form.read_request(asked | change)
    assert refused.value.place == place


def test_answers_in_both_forms():
    options = Option("low"), Option("high", "very")
    answer = answered(Question("score", "", options), [0.25, 0.75], 0.5)
    assert openai_form.answer_form(answer, None) == {
        "type": "score",
        "score": 0.75,
        "probabilities": [
            {"value": 0, "label": "low", "probability": 0.25},
            {"value": 1, "label": "high", "probability": 0.75},
        ],
        "confidence": answer.confidence,
        "name": None,
        "x_label_mass": 0.5,
    }
    given = {"type": "score", "criteria": ["low", {"is": "high"}]}
    assert systemone_form.answer_form(answer, given) == {
        "type": "score",
        "score": 0.75,
        "legend": {"0": "low", "1": {"is": "high"}},
        "probabilities": {"0": 0.25, "1": 0.75},
        "confidence": answer.confidence,
        "x_label_mass": 0.5,
    }
    assert np.isclose(sum(answer.probabilities), 1)
