"""TypeSafe's form of questions and answers (``/v1/systemone``)."""

from typing import Any

from dllm_engine.decisions.questions import (
    MOST_OPTIONS,
    MOST_QUESTIONS,
    Answer,
    Answered,
    Message,
    Option,
    Question,
    QuestionError,
    as_text,
    yes_no,
)

REFUSAL_STATUS = 422
DEFAULT_MODEL = "jev-latest"
"""The model's name if a client names none."""
MOST_LEVELS = 10
"""The most levels of a score."""
_KINDS = ("noul", "choice", "score")


def read_request(body: dict[str, Any]) -> tuple[list[Message], list[Question]]:
    """The state as a message, and the questions; raises ``QuestionError``."""
    for name in ("assets", "images"):
        if body.get(name) is not None:
            raise QuestionError(
                [name], f"{name} are not supported: this model reads text only"
            )
    state = _content(body.get("state"), ["state"])
    questions = body.get("questions")
    if not isinstance(questions, dict) or not 1 <= len(questions) <= MOST_QUESTIONS:
        raise QuestionError(
            ["questions"], f"questions must be an object of 1 to {MOST_QUESTIONS}"
        )
    messages = [{"role": "user", "content": state}]
    return messages, [_question(name, each) for name, each in questions.items()]


def _question(name: str, question: Any) -> Question:
    place: list[str | int] = ["questions", name]
    if not name:
        raise QuestionError(place, "a question needs a name")
    if not isinstance(question, dict):
        raise QuestionError(place, "a question must be an object")
    kind = question.get("type")
    if kind not in _KINDS:
        about = "box is for images, which are not supported; " * (kind == "box")
        raise QuestionError(
            [*place, "type"], f"{about}type must be one of {', '.join(_KINDS)}"
        )
    place.append(kind)
    instructions, text = question.get("instructions"), ""
    if instructions is not None:
        text = _content(instructions, [*place, "instructions"])
    criteria, place = question.get("criteria"), [*place, "criteria"]
    if kind == "noul":
        sides = _sides(criteria, place)
        if instructions is None and not sides:
            raise QuestionError(place, "give instructions, or criteria")
        return yes_no(text, sides.get("true", ""), sides.get("false", ""))
    if kind == "choice":
        return Question("choice", text, _choices(criteria, place))
    return Question("score", text, _levels(criteria, place))


def _sides(criteria: Any, place: list[str | int]) -> dict[str, str]:
    """Criteria of yes or no that are not null."""
    if criteria is None:
        return {}
    if not isinstance(criteria, dict) or criteria.keys() - {"true", "false"}:
        raise QuestionError(place, "criteria of a noul have true, false or both")
    return {
        name: _content(content, [*place, name])
        for name, content in criteria.items()
        if content is not None
    }


def _choices(criteria: Any, place: list[str | int]) -> tuple[Option, ...]:
    if not isinstance(criteria, dict) or not 1 <= len(criteria) <= MOST_OPTIONS:
        raise QuestionError(
            place, f"criteria of a choice must be an object of 1 to {MOST_OPTIONS}"
        )
    return tuple(
        Option(label, "" if content is None else _content(content, [*place, label]))
        for label, content in criteria.items()
    )


def _levels(criteria: Any, place: list[str | int]) -> tuple[Option, ...]:
    if not isinstance(criteria, list) or not 1 <= len(criteria) <= MOST_LEVELS:
        raise QuestionError(
            place, f"criteria of a score must be an array of 1 to {MOST_LEVELS}"
        )
    return tuple(
        Option(_content(content, [*place, i])) for i, content in enumerate(criteria)
    )


def _content(content: Any, place: list[str | int]) -> str:
    """The text of a content."""
    if not isinstance(content, str | dict | list):
        name = ".".join(map(str, place))
        raise QuestionError(place, f"{name} must be a string, an object or an array")
    return as_text(content)


def answer_form(answer: Answer, question: dict[str, Any]) -> dict[str, Any]:
    """An answer in the form of the protocol, with ``x_label_mass``. ``question``: the
    question in the request's body.
    """
    kind, extra = question["type"], {"x_label_mass": answer.label_mass}
    if kind == "noul":
        return {"type": kind, "noul": answer.probabilities[0], **extra}
    extra = {"confidence": answer.confidence, **extra}
    if kind == "choice":
        listed = dict(zip(question["criteria"], answer.probabilities, strict=True))
        return {"type": kind, "choice": answer.value, "probabilities": listed, **extra}
    levels = question["criteria"]
    return {
        "type": kind,
        "score": answer.score,
        "legend": {str(i): level for i, level in enumerate(levels)},
        "probabilities": {str(i): p for i, p in enumerate(answer.probabilities)},
        **extra,
    }


def response(body: dict[str, Any], model: str, answered: Answered) -> dict[str, Any]:
    """The body of an answer."""
    answers_by_question = zip(body["questions"].items(), answered.answers, strict=True)
    return {
        "model": model,
        "answers": {
            name: answer_form(answer, question)
            for (name, question), answer in answers_by_question
        },
        "usage": {"input_tokens": answered.num_tokens, "output_tokens": 0},
    }


def refusal(body: Any, error: QuestionError) -> dict[str, Any]:
    """The body of a refusal, with what is wrong in the request."""
    place = list(error.place)
    if len(place) > 1 and isinstance(place[1], int):
        place[1] = [*body["questions"]][place[1]]
    detail = {"loc": ["body", *place], "msg": error.message, "type": "value_error"}
    return {"detail": [detail]}


def failure(status: int, message: str, code: str) -> dict[str, Any]:
    """The body of an answer with another status."""
    kind = "api_usage_error" if status < 500 else "internal_server_error"
    return {"detail": {"error_type": code or kind, "message": message}}
