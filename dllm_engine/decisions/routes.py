"""The routes ``/v1/decisions`` and ``/v1/systemone``: the protocol of a body, and the
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
"""The routes that come before vLLM's."""


async def _read_body(raw_request: Request) -> bytes:
    """The body. It is read before a handler runs, because the handler then watches the
    client's messages.
    """
    return await raw_request.body()


Body = Annotated[bytes, Depends(_read_body)]


def add_routes(app: Any) -> None:
    """Serve the routes from a FastAPI ``app`` of vLLM's."""

    async def create_decision(body: Body, raw_request: Request) -> JSONResponse:
        read = _parsed(body)
        if _asks_for_fields(read):
            return await http.create_decision(_fields_of(read), raw_request)
        protocol = systemone_form if _is_system_one(read) else openai_form
        return await _answered(protocol, read, raw_request)

    async def create_system_one(body: Body, raw_request: Request) -> JSONResponse:
        kind = raw_request.headers.get("content-type", "")
        # Only images are sent in a form.
        is_form = kind.startswith("multipart/form-data")
        read = {"assets": {}} if is_form else _parsed(body)
        return await _answered(systemone_form, read, raw_request)

    async def show_models(raw_request: Request) -> JSONResponse:
        models = raw_request.app.state.openai_serving_models
        shown = (await models.show_available_models()).model_dump()
        names = [each["id"] for each in shown["data"]]
        since = time.strftime("%Y-%m-%d", time.gmtime(shown["data"][0]["created"]))
        listed = [
            {"name": name, "description": f"{names[0]} on this server"}
            for name in (*names, systemone_form.DEFAULT_MODEL)
        ]
        typesafe_models = [{**each, "release_date": since} for each in listed]
        return JSONResponse({**shown, "models": typesafe_models})

    for route, handler in (
        (DECISIONS, create_decision),
        (SYSTEM_ONE, create_system_one),
    ):
        answer = with_cancellation(load_aware_call(handler))
        app.add_api_route(route, answer, methods=["POST"])
    app.add_api_route(MODELS, show_models, methods=["GET"])


def _asks_for_fields(body: Any) -> bool:
    keys = body.keys() if isinstance(body, dict) else set()
    return "fields" in keys and not keys & {*openai_form.OF_QUESTIONS}


def _is_system_one(body: Any) -> bool:
    if not isinstance(body, dict) or body.keys() & {"input", "fields"}:
        return False
    return "state" in body or isinstance(body.get("questions"), dict)


def _parsed(body: bytes) -> Any:
    """The body as JSON; None if it is not JSON or has a value that cannot be written as
    JSON.
    """
    try:
        read = json.loads(body, parse_constant=_refuse_constant)
        json.dumps(read, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return read


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _fields_of(body: dict[str, Any]) -> http.DecisionRequest:
    try:
        return http.DecisionRequest.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors(), body=body) from None


async def _answered(protocol: Any, body: Any, raw_request: Request) -> JSONResponse:
    """The answer or error in the form of a protocol. ``protocol``: ``openai_form`` or
    ``systemone_form``.
    """
    request_id = f"decision-{random_uuid()}"
    state = raw_request.app.state
    try:
        if not isinstance(body, dict):
            raise QuestionError([], "the body must be a JSON object in valid Unicode")
        messages, questions = protocol.read_request(body)
        model = _model_of(body, state.openai_serving_models)
        answered = await answer_over_http(
            state, model, messages, questions, _joint_of(body), request_id
        )
        content, status = protocol.response(body, model, answered), 200
    except QuestionError as error:
        content, status = protocol.refusal(body, error), protocol.REFUSAL_STATUS
    except HTTPException as error:
        status = error.status_code
        content = protocol.failure(status, str(error.detail), "")
    except Exception as error:
        failure = create_error_response(error).error
        too_long = ("input_tokens", "input_text")
        is_too_long = getattr(error, "parameter", None) in too_long
        status, code = failure.code, "context_length_exceeded" if is_too_long else ""
        content = protocol.failure(status, failure.message, code)
    headers = {"x-request-id": request_id, "x-typesafe-request-id": request_id}
    return JSONResponse(content, status, headers)


def _model_of(body: dict[str, Any], served: Any) -> str:
    if not isinstance(model := body.get("model"), str):
        raise QuestionError(["model"], "model must be a string")
    is_default = model in ("", systemone_form.DEFAULT_MODEL)
    return str(served.model_name()) if is_default else model


def _joint_of(body: dict[str, Any]) -> bool | None:
    joint = body.get("joint")
    if joint is not None and not isinstance(joint, bool):
        raise QuestionError(["joint"], "joint must be true or false")
    return joint
