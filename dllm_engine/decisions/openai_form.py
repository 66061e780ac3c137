"""OpenAI's form of questions and answers (``/v1/decisions`` with ``input`` and
``questions``).
"""

import json
from collections.abc import Sequence
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
    yes_no,
)

REFUSAL_STATUS = 400
OF_QUESTIONS = ("input", "state", "questions")
"""Fields of bodies that ask questions."""
_FIELDS = {
    "model",
    "input",
    "questions",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "joint",
}
_TEXT = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Key of the text in each kind of part."""
_PARTS = {
    "user": ("input_text", "input_image", "input_json"),
    "developer": ("input_text",),
    "system": ("input_text",),
    "assistant": ("output_text", "refusal"),
}
"""Parts of each role's messages."""
_OUTPUT_PARTS = ("input_text", "input_image")
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Key of what a tool is called with."""
_OUTPUTS = {
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
}
_DEEPEST_JSON, _MOST_JSON_VALUES, _MOST_JSON_BYTES = 32, 10_000, 256 << 10
"""Limits of ``input_json``."""


def read_request(body: dict[str, Any]) -> tuple[list[Message], list[Question]]:
    """The input as messages, and the questions; raises ``QuestionError``."""
    asked = [name for name in OF_QUESTIONS if name in body]
    if not asked:
        raise QuestionError(
            [], "Give a JSON object with input and questions, or with fields."
        )
    if "fields" in body:
        raise QuestionError(
            ["fields"], f"fields and {asked[0]} are two forms of a decision; give one"
        )
    _refuse_unknown(body, _FIELDS, [])
    for name, longest in (("safety_identifier", 128), ("prompt_cache_key", 64)):
        if len(_optional_text(body, name, []) or "") > longest:
            raise QuestionError([name], f"Expected a string of at most {longest}.")
    return read_input(body.get("input")), read_questions(body.get("questions"))


def read_questions(given: Any) -> list[Question]:
    """Questions of a request's body; raises ``QuestionError``."""
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_QUESTIONS:
        raise QuestionError(
            ["questions"], f"Provide a list of 1 to {MOST_QUESTIONS} questions."
        )
    return [read_question(each, ["questions", i]) for i, each in enumerate(given)]


def read_question(given: Any, place: list[str | int]) -> Question:
    """A question that stands at ``place`` in its request."""
    given = _object(given, place)
    kind = given.get("type")
    known = {"type", "name", "instructions"}
    _optional_text(given, "name", place)
    if kind not in ("predicate", "choice", "score"):
        raise QuestionError(
            [*place, "type"], "Expected 'predicate', 'choice' or 'score'."
        )
    if kind != "predicate":
        known.add("choices" if kind == "choice" else "levels")
    _refuse_unknown(given, known, place)
    instructions = _content(
        given.get("instructions"), _PARTS["user"], [*place, "instructions"]
    )
    if kind == "predicate":
        return yes_no(instructions)
    if kind == "score":
        levels = _options(given, "levels", "label", str, place)
        return Question("score", instructions, levels)
    choices = _options(given, "choices", "value", str | bool, place)
    if len({(type(each.label), each.label) for each in choices}) < len(choices):
        raise QuestionError([*place, "choices"], "Each choice must be unique.")
    return Question("choice", instructions, choices)


def _options(
    question: dict[str, Any], of: str, label: str, kinds: Any, place: list[str | int]
) -> tuple[Option, ...]:
    """The options that a question has as ``of``, with labels of these kinds."""
    given, place = question.get(of), [*place, of]
    if not isinstance(given, list) or not 2 <= len(given) <= MOST_OPTIONS:
        raise QuestionError(place, f"Provide between 2 and {MOST_OPTIONS} {of}.")
    options = []
    for i, each in enumerate(given):
        option, own = _object(each, [*place, i], {label, "description"}), [*place, i]
        if not isinstance(option.get(label), kinds):
            expected = "string" if kinds is str else "string or boolean"
            raise QuestionError([*own, label], f"Expected a {expected}.")
        description = _optional_text(option, "description", own)
        options.append(Option(option[label], description or ""))
    return tuple(options)


def read_input(given: Any) -> list[Message]:
    """The evidence as messages of a chat."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise QuestionError(["input"], "Provide a string, or a list of items.")
    messages, calls = [], set()
    for i, each in enumerate(given):
        item = _object(each, ["input", i])
        kind = str(item.get("type", "message"))
        if kind == "message":
            messages.append(_message(item, ["input", i]))
        elif kind in _CALLS:
            messages.append(_tool_call(item, kind, ["input", i]))
            calls.add((kind, item["call_id"]))
        elif kind in _OUTPUTS:
            call_id = _optional_text(item, "call_id", ["input", i])
            if (_OUTPUTS[kind], call_id) not in calls:
                raise QuestionError(
                    ["input", i, "call_id"],
                    f"No {_OUTPUTS[kind]} with call_id {call_id!r} stands before this "
                    f"output.",
                )
            output = item.get("output")
            text = _content(output, _OUTPUT_PARTS, ["input", i, "output"])
            text = f"<tool_response>\n{text}\n</tool_response>"
            messages.append({"role": "user", "content": text})
        else:
            raise QuestionError(
                ["input", i, "type"],
                f"Expected 'message', {', '.join(map(repr, [*_CALLS, *_OUTPUTS]))}.",
            )
    return messages


def _message(item: dict[str, Any], place: list[str | int]) -> Message:
    role = str(item.get("role"))
    if role not in _PARTS:
        raise QuestionError(
            [*place, "role"], f"Expected one of {', '.join(map(repr, _PARTS))}."
        )
    content = _content(item.get("content"), _PARTS[role], [*place, "content"])
    return {"role": "system" if role == "developer" else role, "content": content}


def _tool_call(item: dict[str, Any], kind: str, place: list[str | int]) -> Message:
    """The call as text: not every chat template has tools."""
    for name in ("call_id", "name", _CALLS[kind]):
        if not isinstance(item.get(name), str):
            raise QuestionError([*place, name], "Expected a string.")
    call = {"name": item["name"], _CALLS[kind]: item[_CALLS[kind]]}
    text = json.dumps(call, ensure_ascii=False)
    return {"role": "assistant", "content": f"<tool_call>\n{text}\n</tool_call>"}


def _content(given: Any, kinds: Sequence[str], place: list[str | int]) -> str:
    """A text, or parts of these kinds as one text."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise QuestionError(place, "Expected a string, or a list of parts.")
    texts = []
    for i, each in enumerate(given):
        part, own = _object(each, [*place, i]), [*place, i]
        kind = str(part.get("type"))
        if kind not in kinds:
            known = ", ".join(map(repr, kinds))
            raise QuestionError([*own, "type"], f"Expected one of {known}.")
        if kind == "input_image":
            raise QuestionError(
                own, "input_image is not supported: this model reads text only."
            )
        if kind == "input_json":
            texts.append(_json_text(part.get("data"), [*own, "data"]))
        elif isinstance(part.get(_TEXT[kind]), str):
            texts.append(part[_TEXT[kind]])
        else:
            raise QuestionError([*own, _TEXT[kind]], "Expected a string.")
    return "\n".join(texts)


def _json_text(data: Any, place: list[str | int]) -> str:
    is_list = isinstance(data, list) and all(isinstance(each, dict) for each in data)
    if not is_list and not isinstance(data, dict):
        raise QuestionError(place, "Expected an object, or a list of objects.")
    depth, num_values, level = 0, 0, [data]
    while level:
        depth += 1
        inner = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            num_values += len(values)
            inner += [each for each in values if isinstance(each, dict | list)]
        level = inner
        if depth > _DEEPEST_JSON or num_values > _MOST_JSON_VALUES:
            raise QuestionError(
                place,
                f"At most {_DEEPEST_JSON} levels and {_MOST_JSON_VALUES} values.",
            )
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    if len(text.encode(errors="surrogatepass")) > _MOST_JSON_BYTES:
        raise QuestionError(place, f"At most {_MOST_JSON_BYTES} bytes of JSON.")
    return text


def _object(
    given: Any, place: list[str | int], known: set[str] | None = None
) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise QuestionError(place, "Expected an object.")
    if known is not None:
        _refuse_unknown(given, known, place)
    return given


def _refuse_unknown(
    given: dict[str, Any], known: set[str], place: list[str | int]
) -> None:
    for name in given.keys() - known:
        error = QuestionError([*place, name], "")
        raise QuestionError(error.place, f"Unknown parameter: '{error.path}'.")


def _optional_text(
    given: dict[str, Any], name: str, place: list[str | int]
) -> str | None:
    text = given.get(name)
    if text is not None and not isinstance(text, str):
        raise QuestionError([*place, name], "Expected a string.")
    return text


def response(body: dict[str, Any], model: str, answered: Answered) -> dict[str, Any]:
    """The body of an answer."""
    names = [given.get("name") for given in body["questions"]]
    usage = {
        "input_tokens": answered.num_tokens,
        "input_tokens_details": {
            "cached_tokens": answered.num_shared,
            "cache_write_tokens": 0,
        },
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answered.num_tokens,
    }
    answers = map(answer_form, answered.answers, names)
    return {"model": model, "answers": [*answers], "usage": usage}


def answer_form(answer: Answer, name: str | None) -> dict[str, Any]:
    """An answer as the protocol has it, with ``x_label_mass``."""
    extra = {"name": name, "x_label_mass": answer.label_mass}
    if answer.question.kind == "yes_no":
        probability = answer.probabilities[0]
        return {"type": "predicate", "probability": probability, **extra}
    options = zip(answer.question.options, answer.probabilities, strict=True)
    if answer.question.kind == "choice":
        listed = [{"value": each.label, "probability": p} for each, p in options]
        own = {"type": "choice", "choice": answer.value}
    else:
        listed = [
            {"value": i, "label": each.label, "probability": p}
            for i, (each, p) in enumerate(options)
        ]
        own = {"type": "score", "score": answer.score}
    return {**own, "probabilities": listed, "confidence": answer.confidence, **extra}


def refusal(body: Any, error: QuestionError) -> dict[str, Any]:
    """The body of an answer that says what is wrong with the request."""
    return _error(error.message, "invalid_request_error", error.path, None)


def failure(status: int, message: str, code: str) -> dict[str, Any]:
    """The body of an answer with another status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 404:
        return _error(message, kind, "model", "model_not_found")
    if code:  # clients look for these words
        message = f"Input tokens exceed the configured limit. {message}"
    return _error(message, kind, "input" if code else None, code or None)


def _error(
    message: str, kind: str, param: str | None, code: str | None
) -> dict[str, Any]:
    error = {"message": message, "type": kind, "param": param or None, "code": code}
    return {"error": error}
