"""The routes of editors: who asks in which form, and how the answer is sent."""

import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, Any, NamedTuple, Protocol

from fastapi import Depends, HTTPException, Request
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation
from vllm.utils import random_uuid

from dllm_engine.editors import inception, llama_cpp, ollama
from dllm_engine.editors.cursor import (
    Answer,
    Choice,
    CursorRequest,
    Part,
    ask,
    whole,
)
from dllm_engine.editors.openai_forms import FimBody, FimForm
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.text import explain


class Form(Protocol):
    """The form of answers."""

    media_type: str

    def whole(self, answer: Answer, choices: list[Choice], created: int) -> Any: ...
    def event(self, answer: Answer, part: Part) -> str: ...
    def end(self, answer: Answer) -> str: ...
    def error(self, status: int, message: str) -> Any: ...
    def error_event(self, status: int, message: str) -> str: ...


class Route(NamedTuple):
    """A route that completes at a cursor."""

    body: Any
    """Class of the body. Its method ``request`` returns a ``CursorRequest``, or the text
    of an answer that no model is asked for."""
    form: Callable[[Any], Form]
    """The form of the answer to a body; None: to one that cannot be read."""


ROUTES: dict[str, Route] = {
    "/v1/fim/completions": Route(FimBody, lambda body: FimForm()),
    "/infill": Route(llama_cpp.InfillBody, llama_cpp.LlamaForm),
    "/completion": Route(llama_cpp.CompletionBody, llama_cpp.LlamaForm),
    "/api/generate": Route(ollama.GenerateBody, ollama.OllamaForm),
    "/v1/edit/completions": Route(inception.EditBody, inception.EditForm),
    "/v1/apply/completions": Route(
        inception.ApplyBody, lambda body: inception.ChatForm()
    ),
}
"""Routes that are asked for completions."""
SHOW = "/api/show"
LISTS = ("fim", "edit", "chat")
"""Kinds of completions of which Inception's client lists the models."""
OWN_BODIES = (*ROUTES, SHOW)
"""Routes whose bodies have fields of their own."""
GUARDED = ("/infill", "/completion", "/props", "/api/")
"""Beginnings of routes that ask for the server's API key, beside ``/v1``."""


async def _read_body(raw_request: Request) -> bytes:
    """The body. Read before a handler runs: it watches what the client sends then."""
    return await raw_request.body()


Body = Annotated[bytes, Depends(_read_body)]


def add_routes(app: Any) -> None:
    """Serve the routes from a FastAPI ``app`` of vLLM's."""
    for path, route in ROUTES.items():
        handler = with_cancellation(load_aware_call(_handler(route)))
        app.add_api_route(path, handler, methods=["POST"])

    async def show_props(raw_request: Request) -> JSONResponse:
        config, models = _served(raw_request)
        return JSONResponse(llama_cpp.props(config.max_model_len, models[0]))

    async def show_version() -> JSONResponse:
        return JSONResponse(ollama.version())

    async def show_tags(raw_request: Request) -> JSONResponse:
        config, models = _served(raw_request)
        return JSONResponse(ollama.tags(models, config.hf_config.model_type))

    async def show_model(body: Body, raw_request: Request) -> JSONResponse:
        config, models = _served(raw_request)
        try:
            asked = _parsed(body, ollama.ShowBody)
        except InvalidRequestError as error:
            return JSONResponse({"error": str(error)}, 400)
        name = ollama.model_name(asked.model or asked.name or "")
        if name not in models:
            return JSONResponse({"error": f"model {name!r} not found"}, 404)
        fills_in = config.hf_config.family.attention == "full"
        family = config.hf_config.model_type
        return JSONResponse(
            ollama.shown(family, config.max_model_len, fills_in=fills_in)
        )

    async def list_models(raw_request: Request) -> JSONResponse:
        config, models = _served(raw_request)
        created = int(time.time())
        return JSONResponse(inception.models(models, config.max_model_len, created))

    for kind in LISTS:
        path = f"/v1/{kind}/completions/models"
        app.add_api_route(path, list_models, methods=["GET"])
    app.add_api_route("/props", show_props, methods=["GET"])
    app.add_api_route("/api/version", show_version, methods=["GET"])
    app.add_api_route("/api/tags", show_tags, methods=["GET"])
    app.add_api_route(SHOW, show_model, methods=["POST"])


def _served(raw_request: Request) -> tuple[Any, list[str]]:
    """The model's config, and the names that it is served by."""
    models = raw_request.app.state.openai_serving_models
    names = [each.name for each in models.base_model_paths]
    return models.model_config, names


def _handler(route: Route) -> Callable[..., Any]:
    async def complete(body: Body, raw_request: Request) -> Response:
        form = route.form(None)
        try:
            read = _parsed(body, route.body)
            form = route.form(read)
            return await _answered(read, form, raw_request)
        except Exception as error:
            status, message = _failure(error)
            return JSONResponse(form.error(status, message), status)

    return complete


def _parsed(body: bytes, kind: Any) -> Any:
    """The body as an object of ``kind``, a class of pydantic's."""
    try:
        fields = json.loads(body)
        json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no JSON: {error}") from None
    try:
        read: BaseModel = kind.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequestError(explain(error, "", kind.model_fields)) from None
    return read


def _failure(error: Exception) -> tuple[int, str]:
    """Status and message of an error."""
    if isinstance(error, HTTPException):
        return error.status_code, str(error.detail)
    failure = create_error_response(error).error
    return failure.code, failure.message


async def _answered(body: Any, form: Form, raw_request: Request) -> Response:
    state, request = raw_request.app.state, body.request()
    if isinstance(request, CursorRequest):
        answer = await ask(request, state, f"fim-{random_uuid()}")
    else:
        model = body.model or state.openai_serving_models.model_name()
        answer = Answer(f"fim-{random_uuid()}", model, known=request)
    if body.stream:
        return StreamingResponse(_events(answer, form), media_type=form.media_type)
    limit = getattr(body, "t_max_predict_ms", None)
    choices = await whole(answer, limit)
    return JSONResponse(form.whole(answer, choices, int(time.time())))


async def _events(answer: Answer, form: Form) -> AsyncGenerator[str, None]:
    async with aclosing(answer.parts()) as parts:
        try:
            async for part in parts:
                if event := form.event(answer, part):
                    yield event
        except HTTPException as error:
            yield form.error_event(error.status_code, str(error.detail))
            return
    yield form.end(answer)
