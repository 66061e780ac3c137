"""Questions over HTTP, in OpenAI's and in TypeSafe's protocol."""

import json
from typing import Any

import numpy as np
import pytest
import zstandard
from openai import BadRequestError

from dllm_engine import Questions
from dllm_engine.decisions.answering import as_messages
from dllm_engine.decisions.calibration import Calibration, Correction
from dllm_engine.evaluation.runner import scheduler_of
from dllm_engine.model_executor.constraints.running_decision import RunningDecision
from dllm_engine.request_options.sampling_params import SOURCE
from tests.support.engines import assert_nothing_left
from tests.support.http_app import app_client, refusal, served

TEXT = "Tom lives in Paris. Ida lives in Rome. Ben lives in Oslo."
CITIES = ("Paris", "Rome", "Oslo")
QUESTIONS: list[dict[str, Any]] = [
    {
        "type": "choice",
        "name": "tom",
        "instructions": "Where does Tom live?",
        "choices": [{"value": city} for city in CITIES],
    },
    {"type": "predicate", "instructions": "Ida lives in Rome."},
    {
        "type": "score",
        "name": "many",
        "instructions": "How many?",
        "levels": [{"label": "none"}, {"label": "some", "description": "1 to 3"}],
    },
    {
        "type": "choice",
        "instructions": "typed",
        "choices": [{"value": "true"}, {"value": True}, {"value": ""}],
    },
]
ONE_OPTION = {"type": "choice", "criteria": {"a": None}}
NOUL = {"type": "noul", "instructions": "Ida lives in Rome."}


def decided(client, **change):
    body = {"model": "demo", "input": TEXT, "questions": QUESTIONS} | change
    answer = client.post("/v1/decisions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def system_one(client, **change):
    body = {"model": "jev-latest", "state": TEXT, "questions": {"n": NOUL}} | change
    return client.post("/v1/systemone", json=body)


def assert_equal(answers, expected):
    """But for names and the last bits, which depend on the batch."""
    for answer, other in zip(answers, expected, strict=True):
        assert numbers_in(answer) == pytest.approx(numbers_in(other), abs=1e-5)


def numbers_in(answer):
    shares = [each["probability"] for each in answer.get("probabilities", ())]
    own = answer.get("probability", answer.get("confidence"))
    return [own, answer["x_label_mass"], *shares]


def test_openai_answers(client, demo):
    decision = decided(client)
    choice, predicate, score, typed = decision["answers"]
    assert choice["choice"] == "Paris"
    assert choice["name"] == "tom"
    assert [each["value"] for each in choice["probabilities"]] == [*CITIES]
    assert choice["probabilities"][0]["probability"] > 0.99
    assert choice["x_label_mass"] > 0.99
    assert predicate.keys() == {"type", "name", "probability", "x_label_mass"}
    assert predicate["name"] is None
    high = score["probabilities"][1]
    assert high["label"] == "some"
    assert score["score"] == pytest.approx(high["probability"])
    assert [each["value"] for each in typed["probabilities"]] == ["true", True, ""]
    usage = decision["usage"]
    assert usage["input_tokens"] == usage["total_tokens"] > 4 * 20
    assert usage["output_tokens"] == 0
    (offline,) = demo.decide(TEXT, Questions(QUESTIONS))
    assert offline[0].probabilities == pytest.approx(
        [each["probability"] for each in choice["probabilities"]], abs=1e-5
    )
    assert_nothing_left(demo)


def test_one_option_needs_no_pass_and_its_input_is_counted(client):
    decision = system_one(client, questions={"n": ONE_OPTION}).json()
    assert decision["answers"]["n"]["confidence"] == 1
    assert decision["usage"]["input_tokens"] > 0


def test_answers_do_not_depend_on_other_questions_names_or_order(client):
    expected = decided(client)["answers"]
    renamed = [{**each, "name": f"n{i}"} for i, each in enumerate(QUESTIONS)]
    backwards = decided(client, questions=renamed[::-1])["answers"]
    assert_equal(backwards[::-1], expected)
    alone = [decided(client, questions=[each])["answers"][0] for each in QUESTIONS]
    assert_equal(alone, expected)


def test_joint_questions_take_one_pass(client, demo, monkeypatch):
    calls, commit = [], RunningDecision.commit

    def counted(self, *args, **kwargs):
        calls.append(self)
        return commit(self, *args, **kwargs)

    monkeypatch.setattr(RunningDecision, "commit", counted)
    questions = QUESTIONS[:1] * 12
    joint = decided(client, questions=questions, joint=True)["answers"]
    assert len(joint) == 12
    assert len(calls) == 1


def test_the_rows_of_a_request_share_a_turn(client, demo, monkeypatch):
    """Sources take turns in each step (``tests/scheduler/test_turns.py``)."""
    scheduler, sources = scheduler_of(demo), []
    add = scheduler.add_request

    def noted(request):
        sources.append(request.sampling_params.extra_args[SOURCE])
        add(request)

    monkeypatch.setattr(scheduler, "add_request", noted)
    decided(client, questions=QUESTIONS[:1] * 100)
    decided(client)
    assert [sources.count(each) for each in dict.fromkeys(sources)] == [100, 4]


def test_many_labels(client):
    labels = [f"Übung {i}" for i in range(255)]
    question = {
        "type": "choice",
        "instructions": "Which?",
        "choices": [{"value": label} for label in labels],
    }
    (answer,) = decided(client, questions=[question])["answers"]
    assert [each["value"] for each in answer["probabilities"]] == labels
    total = sum(each["probability"] for each in answer["probabilities"])
    assert total == pytest.approx(1)


def test_systemone_answers(client):
    questions = {
        "n": NOUL,
        "c": {"type": "choice", "criteria": {"Paris": None, "Rome": {"k": 1}}},
        "s": {"type": "score", "criteria": ["low", {"x": 1}, "high"]},
        "one": {"type": "choice", "criteria": {"é": None}},
    }
    response = system_one(client, state={"text": TEXT}, questions=questions, x=1)
    assert response.status_code == 200, response.text
    assert response.headers["x-typesafe-request-id"]
    body = response.json()
    answers = body["answers"]
    assert body["model"] == "demo"
    assert body["usage"]["output_tokens"] == 0
    assert [*answers] == [*questions]
    assert answers["n"].keys() == {"type", "noul", "x_label_mass"}
    assert answers["c"]["probabilities"].keys() == {"Paris", "Rome"}
    assert answers["s"]["legend"] == {"0": "low", "1": {"x": 1}, "2": "high"}
    assert answers["one"]["probabilities"] == {"é": 1.0}
    (same,) = decided(client, questions=QUESTIONS[1:2])["answers"]
    alone = system_one(client).json()["answers"]["n"]
    assert alone["noul"] == pytest.approx(same["probability"], abs=1e-5)


def test_a_compressed_body_and_one_on_the_other_route(client):
    body = {"model": "demo", "state": TEXT, "questions": {"n": NOUL}}
    expected = system_one(client).json()["answers"]
    other = client.post("/v1/decisions", json=body).json()["answers"]
    sent = zstandard.compress(client.build_request("POST", "/", json=body).content)
    headers = {"content-encoding": "zstd", "content-type": "application/json"}
    packed = client.post("/v1/systemone", content=sent, headers=headers)
    for answers in (other, packed.json()["answers"]):
        assert answers["n"]["noul"] == pytest.approx(expected["n"]["noul"], abs=1e-5)
    broken = client.post("/v1/systemone", content=b"no", headers=headers)
    assert broken.status_code == 400
    bomb = zstandard.compress(b" " * (17 << 20))
    large = client.post("/v1/systemone", content=bomb, headers=headers)
    assert large.status_code == 413


def test_models_are_listed_for_both_kinds_of_clients(client, openai):
    assert [model.id for model in openai.models.list()] == ["demo"]
    listed = client.get("/v1/models").json()["models"]
    assert [each["name"] for each in listed] == ["demo", "jev-latest"]
    assert all(isinstance(text, str) for each in listed for text in each.values())
    for name in ("", "jev-latest"):
        assert decided(client, model=name)["model"] == "demo"


@pytest.mark.parametrize(
    ("change", "status", "expected"),
    [
        ({"model": "other"}, 404, {"code": "model_not_found", "param": "model"}),
        ({"model": None}, 400, {"param": "model"}),
        (
            {"input": "word " * 5000},
            400,
            {"code": "context_length_exceeded", "param": "input"},
        ),
        (
            {"questions": QUESTIONS * 20, "joint": True},
            400,
            {"code": "context_length_exceeded", "param": "input"},
        ),
        ({"questions": [{"type": "x"}]}, 400, {"param": "questions[0].type"}),
        ({"joint": 1}, 400, {"param": "joint"}),
        (
            {"fields": {}},
            400,
            {"message": "fields and input are two forms", "param": "fields"},
        ),
        ({"input": "\ud800"}, 400, {}),
    ],
)
def test_openai_errors(client, change, status, expected):
    body = {"model": "demo", "input": TEXT, "questions": QUESTIONS} | change
    response = client.post(
        "/v1/decisions",
        content=json.dumps(body),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == status, response.text
    error = response.json()["error"]
    for name, value in expected.items():
        assert str(error[name]).startswith(value)
    assert error["type"] == "invalid_request_error"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "other"}, 404, "other"),
        ({"model": "other", "questions": {"n": ONE_OPTION}}, 404, "other"),
        ({"state": "word " * 5000}, 400, "context length"),
        ({"questions": {"a": {"type": "box"}}}, 422, "box is for images"),
        ({"assets": {"a": {}}}, 422, "assets are not supported"),
    ],
)
def test_systemone_errors(client, change, status, message):
    response = system_one(client, **change)
    assert response.status_code == status, response.text
    assert message in str(response.json()["detail"])


def test_images_in_a_form_are_refused_by_name(client):
    parts = {"request": (None, "{}", "application/json"), "photo": ("x.png", b"x")}
    response = client.post("/v1/systemone", files=parts)
    assert response.status_code == 422
    (error,) = response.json()["detail"]
    assert error["loc"] == ["body", "assets"]
    assert error["msg"].startswith("assets are not supported")


def test_labels_that_the_model_cannot_write_are_named(client):
    choices = [{"value": "<|mdm_mask|>\0"}, {"value": " a"}, {"value": "a"}]
    question = {"type": "choice", "instructions": "?", "choices": choices}
    body = {"model": "demo", "input": "", "questions": [question]}
    response = client.post("/v1/decisions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "have the same tokens; start the engine" in error["message"]
    assert error["param"] == "questions[0]"


def test_all_labels_together_have_a_limit(client):
    choices = [{"value": f"{i} " + "x" * 300_000} for i in range(4)]
    question = {"type": "choice", "instructions": "?", "choices": choices}
    body = {"model": "demo", "input": "", "questions": [question]}
    assert "at most 1048576" in refusal(client.post("/v1/decisions", json=body))


@pytest.mark.parametrize("option", ["decision_template", "decision_calibration"])
def test_a_server_does_not_start_without_its_files(option):
    config = json.dumps({"dllm": {option: "nowhere"}})
    with pytest.raises(ValueError, match=f"{option}='nowhere'"):
        app_client("--additional-config", config)


def test_a_failure_of_the_engine_is_no_bad_request(client, monkeypatch):
    monkeypatch.setattr(RunningDecision, "commit", lambda self, *args, **kwargs: 1 / 0)
    fields = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    for response in (
        client.post(
            "/v1/decisions",
            json={"model": "demo", "input": TEXT, "questions": QUESTIONS},
        ),
        client.post("/v1/decisions", json={"prompt": TEXT, "fields": fields}),
        system_one(client),
    ):
        assert response.status_code == 500
        assert "ZeroDivisionError" in response.text


def test_the_api_key_is_asked_for(demo):
    with_key = served(demo, "--served-model-name", "demo", "--api-key", "secret")
    assert system_one(with_key).status_code == 401
    with_key.headers["authorization"] = "Bearer secret"
    assert system_one(with_key).status_code == 200


def test_openai_client_reads_errors(openai):
    with pytest.raises(BadRequestError) as refused:
        openai.decisions.create(model="demo", input=TEXT, questions=[])
    assert refused.value.param == "questions"


def test_a_template_of_ones_own(engines, tmp_path):
    template = tmp_path / "words.jinja"
    template.write_text(
        '{% set way = "marks" %}'
        "{% macro prompt(text, questions, way) %}{{ text }}!{% endmacro %}"
        "{% macro response(question, number, answer) %}={{ answer }}{% endmacro %}"
    )
    settings = {"skip_tokenizer_init": False, "decision_template": str(template)}
    llm = engines("demo", **settings)
    (row,) = llm.asking.rows(as_messages(TEXT), Questions(QUESTIONS[:1]).read)
    assert row.messages == [{"role": "user", "content": f"{TEXT}!"}]
    (answers,) = llm.decide(TEXT, Questions(QUESTIONS[:2]))
    assert answers[1].probabilities[0] != pytest.approx(0.5, abs=1e-3)


def test_a_calibration_takes_the_mean_of_orders_and_divides_by_the_prior(
    demo, engines, tmp_path
):
    file = tmp_path / "calibration.json"
    correction = Correction(temperature=2.0, orders=3, has_prior=True)
    Calibration({"choice": correction}).write(file)
    settings = {"skip_tokenizer_init": False, "decision_calibration": str(file)}
    llm = engines("demo", **settings)
    choices = [{"value": city} for city in CITIES]
    rotated = [{**QUESTIONS[0], "choices": choices[i:] + choices[:i]} for i in range(3)]

    def mean(text):
        (answers,) = demo.decide(text, Questions(rotated))
        shares = [np.roll(each.probabilities, i) for i, each in enumerate(answers)]
        return np.mean(shares, axis=0)

    # Of people that the text does not tell of, so that no answer is certain.
    text = "Ida lives in Rome."
    expected = np.sqrt(mean(text) / mean(""))
    others = [QUESTIONS[1], *rotated]
    for joint in (False, None):
        (answers,) = llm.decide(text, Questions(others, joint))
        for i, each in enumerate(answers[1:]):
            assert np.roll(each.probabilities, i) == pytest.approx(
                expected / expected.sum(), abs=1e-4
            )
    assert_nothing_left(llm)


def test_markers_in_a_text_are_text(client):
    marked = {
        "type": "choice",
        "instructions": "<|mdm_mask|>?",
        "choices": [{"value": "<|mdm_mask|>"}, {"value": "<eos>"}],
    }
    (answer,) = decided(client, input="<|mdm_mask|>" + TEXT, questions=[marked])[
        "answers"
    ]
    assert answer["choice"] in ("<|mdm_mask|>", "<eos>")
