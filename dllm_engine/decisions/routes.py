"""``/v1/decisions`` and ``/v1/systemone``: which protocol a body speaks, and the
answers in that protocol. ``/v1/models`` for the clients of both.
"""

import json
import time
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation
from vllm.utils import random_uuid

from dllm_engine.decisions import http, openai_form, systemone_form
from dllm_engine.decisions.answering import answer_over_http
from dllm_engine.decisions.questions import QuestionError

DECISIONS, SYSTEM_ONE, MODELS = "/v1/decisions", "/v1/systemone", "/v1/models"
ROUTES = (DECISIONS, SYSTEM_ONE, MODELS)
"""The routes that stand before vLLM's own."""
_OF_QUESTIONS = ("input", "state", "questions")
"""Fields of bodies that ask questions."""


async def _read_body(raw_request: Request) -> bytes:
    """The body. Read before a handler runs: it watches what the client sends then."""
    return await raw_request.body()


Body = Annotated[bytes, Depends(_read_body)]


def add_routes(app: Any) -> None:
    """Serve the routes from a FastAPI ``app`` of vLLM's."""

    async def create_decision(body: Body, raw_request: Request) -> JSONResponse:
        read = _parsed(body)
        if _asks_for_fields(read):
            return await http.create_decision(_fields_of(read), raw_request)
        protocol = _system_one if _is_system_one(read) else _openai
        return await _answered(protocol, read, raw_request)

    async def create_system_one(body: Body, raw_request: Request) -> JSONResponse:
        kind = raw_request.headers.get("content-type", "")
        # Only images come in a form.
        is_form = kind.startswith("multipart/form-data")
        read = {"assets": {}} if is_form else _parsed(body)
        return await _answered(_system_one, read, raw_request)

    async def show_models(raw_request: Request) -> JSONResponse:
        models = raw_request.app.state.openai_serving_models
        shown = (await models.show_available_models()).model_dump()
        names = [each["id"] for each in shown["data"]]
        since = time.strftime("%Y-%m-%d", time.gmtime(shown["data"][0]["created"]))
        listed = [
            {"name": name, "description": f"{names[0]} on this server"}
            for name in (*names, systemone_form.DEFAULT_MODEL)
        ]
        of_typesafe = [{**each, "release_date": since} for each in listed]
        return JSONResponse({**shown, "models": of_typesafe})

    for route, handler in (
        (DECISIONS, create_decision),
        (SYSTEM_ONE, create_system_one),
    ):
        answer = with_cancellation(load_aware_call(handler))
        app.add_api_route(route, answer, methods=["POST"])
    app.add_api_route(MODELS, show_models, methods=["GET"])


def _asks_for_fields(body: Any) -> bool:
    keys = body.keys() if isinstance(body, dict) else set()
    return "fields" in keys and not keys & {*_OF_QUESTIONS}


def _is_system_one(body: Any) -> bool:
    if not isinstance(body, dict) or body.keys() & {"input", "fields"}:
        return False
    return "state" in body or isinstance(body.get("questions"), dict)


def _parsed(body: bytes) -> Any:
    """The body as JSON; None where it is none, or holds what JSON has no text for."""
    try:
        read = json.loads(body, parse_constant=_refuse_constant)
        json.dumps(read, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return read


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _fields_of(body: dict[str, Any]) -> http.DecisionRequest:
    try:
        return http.DecisionRequest.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors(), body=body) from None


async def _answered(protocol: Any, body: Any, raw_request: Request) -> JSONResponse:
    """The answer in a protocol, and its errors."""
    request_id = f"decision-{random_uuid()}"
    try:
        content, status = await protocol.answer(body, raw_request, request_id), 200
    except QuestionError as error:
        content, status = protocol.refusal(body, error), protocol.refusal_status
    except HTTPException as error:
        content = protocol.failure(error.status_code, str(error.detail), "")
        status = error.status_code
    except Exception as error:
        failure = create_error_response(error).error
        is_too_long = getattr(error, "parameter", None) in (
            "input_tokens",
            "input_text",
        )
        code = "context_length_exceeded" if is_too_long else ""
        content = protocol.failure(failure.code, failure.message, code)
        status = failure.code
    headers = {"x-request-id": request_id, "x-typesafe-request-id": request_id}
    return JSONResponse(content, status, headers)


class _OpenAI:
    """OpenAI's protocol."""

    refusal_status = 400

    async def answer(
        self, body: Any, raw_request: Request, request_id: str
    ) -> dict[str, Any]:
        if not isinstance(body, dict) or not body.keys() & {"input", "questions"}:
            raise QuestionError(
                [], "Give a JSON object with input and questions, or with fields."
            )
        if "fields" in body:
            other = next(name for name in _OF_QUESTIONS if name in body)
            raise QuestionError(
                ["fields"], f"fields and {other} are two forms of a decision; give one"
            )
        model = _model_of(body)
        messages, questions = openai_form.read_request(body)
        answered = await answer_over_http(
            raw_request.app.state,
            model,
            messages,
            questions,
            _joint_of(body),
            request_id,
        )
        return {
            "model": model,
            "answers": [
                openai_form.answer_form(answer, given.get("name"))
                for answer, given in zip(
                    answered.answers, body["questions"], strict=True
                )
            ],
            "usage": openai_form.usage_form(answered.num_tokens, answered.num_shared),
        }

    def refusal(self, body: Any, error: QuestionError) -> dict[str, Any]:
        return self._error(error.message, "invalid_request_error", error.path, None)

    def failure(self, status: int, message: str, code: str) -> dict[str, Any]:
        kind = "invalid_request_error" if status < 500 else "server_error"
        if status == 404:
            return self._error(message, kind, "model", "model_not_found")
        if code:  # clients look for these words
            message = f"Input tokens exceed the configured limit. {message}"
        return self._error(message, kind, "input" if code else None, code or None)

    def _error(
        self, message: str, kind: str, param: str | None, code: str | None
    ) -> dict[str, Any]:
        error = {"message": message, "type": kind, "param": param or None, "code": code}
        return {"error": error}


class _SystemOne:
    """TypeSafe's protocol."""

    refusal_status = 422

    async def answer(
        self, body: Any, raw_request: Request, request_id: str
    ) -> dict[str, Any]:
        if not isinstance(body, dict):
            raise QuestionError([], "the body must be a JSON object")
        state, questions = systemone_form.read_request(body)
        asked = _model_of(body)
        models = raw_request.app.state.openai_serving_models
        is_default = asked == systemone_form.DEFAULT_MODEL
        model = models.model_name() if is_default else asked
        answered = await answer_over_http(
            raw_request.app.state,
            model,
            [{"role": "user", "content": state}],
            list(questions.values()),
            _joint_of(body),
            request_id,
        )
        given = body["questions"]
        answers = zip(questions, answered.answers, strict=True)
        return {
            "model": model,
            "answers": {
                name: systemone_form.answer_form(answer, given[name])
                for name, answer in answers
            },
            "usage": {"input_tokens": answered.num_tokens, "output_tokens": 0},
        }

    def refusal(self, body: Any, error: QuestionError) -> dict[str, Any]:
        place = list(error.place)
        if len(place) > 1 and isinstance(place[1], int):
            place[1] = [*body["questions"]][place[1]]
        return systemone_form.errors_form(QuestionError(place, error.message))

    def failure(self, status: int, message: str, code: str) -> dict[str, Any]:
        kind = "api_usage_error" if status < 500 else "internal_server_error"
        return systemone_form.error_form(code or kind, message)


_openai, _system_one = _OpenAI(), _SystemOne()


def _model_of(body: dict[str, Any]) -> str:
    if not isinstance(model := body.get("model"), str):
        raise QuestionError(["model"], "model must be a string")
    return model


def _joint_of(body: dict[str, Any]) -> bool | None:
    joint = body.get("joint")
    if joint is not None and not isinstance(joint, bool):
        raise QuestionError(["joint"], "joint must be true or false")
    return joint
