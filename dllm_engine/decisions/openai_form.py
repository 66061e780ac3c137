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
"""Key of a tool call's arguments."""
_OUTPUTS = {
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
}
_DEEPEST_JSON, _MOST_JSON_VALUES, _MOST_JSON_BYTES = 32, 10_000, 256 << 10
"""Limits of ``input_json``."""


def read_request(body: dict[str, Any]) -> tuple[list[Message], list[Question]]:
    """The input as messages, and the questions. Raises ``QuestionError``."""
    names = [name for name in OF_QUESTIONS if name in body]
    if not names:
        raise QuestionError(
            [], "Give a JSON object with input and questions, or with fields."
        )
    if "fields" in body:
        raise QuestionError(
            ["fields"],
            f"fields and {names[0]} are two forms of a decision; give one",
        )
    _refuse_unknown(body, _FIELDS, [])
    for name, longest in (("safety_identifier", 128), ("prompt_cache_key", 64)):
        if len(_optional_text(body, name, []) or "") > longest:
            raise QuestionError([name], f"Expected a string of at most {longest}.")
    return read_input(body.get("input")), read_questions(body.get("questions"))


def read_questions(questions: Any) -> list[Question]:
    """Questions of a request's body. Raises ``QuestionError``."""
    if not isinstance(questions, list) or not 1 <= len(questions) <= MOST_QUESTIONS:
        raise QuestionError(
            ["questions"], f"Provide a list of 1 to {MOST_QUESTIONS} questions."
        )
    return [
        read_question(question, ["questions", i])
        for i, question in enumerate(questions)
    ]


def read_question(question: Any, place: list[str | int]) -> Question:
    """The question at ``place`` in its request."""
    question = _object(question, place)
    kind = question.get("type")
    known = {"type", "name", "instructions"}
    _optional_text(question, "name", place)
    if kind not in ("predicate", "choice", "score"):
        raise QuestionError(
            [*place, "type"], "Expected 'predicate', 'choice' or 'score'."
        )
    if kind != "predicate":
        known.add("choices" if kind == "choice" else "levels")
    _refuse_unknown(question, known, place)
    instructions = _content(
        question.get("instructions"), _PARTS["user"], [*place, "instructions"]
    )
    if kind == "predicate":
        return yes_no(instructions)
    if kind == "score":
        levels = _options(question, "levels", "label", str, place)
        return Question("score", instructions, levels)
    choices = _options(question, "choices", "value", str | bool, place)
    if len({(type(each.label), each.label) for each in choices}) < len(choices):
        raise QuestionError([*place, "choices"], "Each choice must be unique.")
    return Question("choice", instructions, choices)


def _options(
    question: dict[str, Any], of: str, label: str, kinds: Any, place: list[str | int]
) -> tuple[Option, ...]:
    """The options in the question's field ``of``, with labels of these kinds."""
    entries, place = question.get(of), [*place, of]
    if not isinstance(entries, list) or not 2 <= len(entries) <= MOST_OPTIONS:
        raise QuestionError(place, f"Provide between 2 and {MOST_OPTIONS} {of}.")
    options = []
    for i, entry in enumerate(entries):
        option_place = [*place, i]
        option = _object(entry, option_place, {label, "description"})
        if not isinstance(option.get(label), kinds):
            expected = "string" if kinds is str else "string or boolean"
            raise QuestionError([*option_place, label], f"Expected a {expected}.")
        description = _optional_text(option, "description", option_place)
        options.append(Option(option[label], description or ""))
    return tuple(options)


def read_input(items: Any) -> list[Message]:
    """The evidence as messages of a chat."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise QuestionError(["input"], "Provide a string, or a list of items.")
    messages, calls = [], set()
    for i, entry in enumerate(items):
        item = _object(entry, ["input", i])
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
    """The call as text, because not every chat template has tools."""
    for name in ("call_id", "name", _CALLS[kind]):
        if not isinstance(item.get(name), str):
            raise QuestionError([*place, name], "Expected a string.")
    call = {"name": item["name"], _CALLS[kind]: item[_CALLS[kind]]}
    text = json.dumps(call, ensure_ascii=False)
    return {"role": "assistant", "content": f"<tool_call>\n{text}\n</tool_call>"}


def _content(content: Any, kinds: Sequence[str], place: list[str | int]) -> str:
    """The text of a content: a text, or parts of these kinds."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise QuestionError(place, "Expected a string, or a list of parts.")
    texts = []
    for i, entry in enumerate(content):
        part_place = [*place, i]
        part = _object(entry, part_place)
        kind = str(part.get("type"))
        if kind not in kinds:
            known = ", ".join(map(repr, kinds))
            raise QuestionError([*part_place, "type"], f"Expected one of {known}.")
        if kind == "input_image":
            raise QuestionError(
                part_place, "input_image is not supported: this model reads text only."
            )
        if kind == "input_json":
            texts.append(_json_text(part.get("data"), [*part_place, "data"]))
        elif isinstance(part.get(_TEXT[kind]), str):
            texts.append(part[_TEXT[kind]])
        else:
            raise QuestionError([*part_place, _TEXT[kind]], "Expected a string.")
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
    value: Any, place: list[str | int], known: set[str] | None = None
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise QuestionError(place, "Expected an object.")
    if known is not None:
        _refuse_unknown(value, known, place)
    return value


def _refuse_unknown(
    fields: dict[str, Any], known: set[str], place: list[str | int]
) -> None:
    for name in fields:
        if name not in known:
            path = QuestionError([*place, name], "").path
            raise QuestionError([*place, name], f"Unknown parameter: '{path}'.")


def _optional_text(
    fields: dict[str, Any], name: str, place: list[str | int]
) -> str | None:
    text = fields.get(name)
    if text is not None and not isinstance(text, str):
        raise QuestionError([*place, name], "Expected a string.")
    return text


def response(body: dict[str, Any], model: str, answered: Answered) -> dict[str, Any]:
    """The body of an answer."""
    names = [question.get("name") for question in body["questions"]]
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
        form = {"type": "choice", "choice": answer.value}
    else:
        listed = [
            {"value": i, "label": each.label, "probability": p}
            for i, (each, p) in enumerate(options)
        ]
        form = {"type": "score", "score": answer.score}
    return {**form, "probabilities": listed, "confidence": answer.confidence, **extra}


def refusal(body: Any, error: QuestionError) -> dict[str, Any]:
    """The body of a refusal, with what is wrong in the request."""
    return _error(error.message, "invalid_request_error", error.path, None)


def failure(status: int, message: str, code: str) -> dict[str, Any]:
    """The body of an answer with another status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 404:
        return _error(message, kind, "model", "model_not_found")
    if code:  # Clients look for these words.
        message = f"Input tokens exceed the configured limit. {message}"
    return _error(message, kind, "input" if code else None, code or None)


def _error(
    message: str, kind: str, param: str | None, code: str | None
) -> dict[str, Any]:
    error = {"message": message, "type": kind, "param": param or None, "code": code}
    return {"error": error}
