"""The routes of editors: the forms of their requests and answers."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request
from pydantic import BaseModel, ValidationError
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)
from vllm.entrypoints.serve.instrumentator.health import health
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation
from vllm.utils import random_uuid

from dllm_engine.editors import fim, inception, llama_cpp, ollama
from dllm_engine.editors.cursor import Answer, CursorRequest, ask, known
from dllm_engine.editors.forms import Form
from dllm_engine.editors.merging import Merge
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.text import explain

ROUTES: dict[str, tuple[Any, type[Form]]] = {
    "/v1/fim/completions": (fim.FimBody, fim.FimForm),
    "/infill": (llama_cpp.InfillBody, llama_cpp.LlamaForm),
    "/completion": (llama_cpp.CompletionBody, llama_cpp.LlamaForm),
    "/api/generate": (ollama.GenerateBody, ollama.OllamaForm),
    "/v1/edit/completions": (inception.EditBody, inception.EditForm),
    "/v1/apply/completions": (inception.ApplyBody, fim.FimForm),
}
"""For each route, the class of its bodies and the form of its answers. A body's
``request()`` is a ``CursorRequest``, a ``Merge``, or the text of an answer that needs
no model.
"""
FACTS: dict[str, Callable[[Any, list[str]], dict[str, Any]]] = {
    "/v1/fim/completions/models": inception.models,
    "/v1/edit/completions/models": inception.models,
    "/v1/chat/completions/models": inception.models,
    "/props": llama_cpp.props,
    "/api/version": ollama.version,
    "/api/tags": ollama.tags,
}
"""Routes with facts about the model, and the functions that make them from its config
and its names.
"""
SHOW = "/api/show"
OWN_BODIES = (*ROUTES, SHOW)
"""Routes whose bodies have their own fields."""
GUARDED = ("/infill", "/completion", "/props", "/api/")
"""Beginnings of routes that need the server's API key, in addition to ``/v1``."""
REPLACED = ("/health",)
"""Routes of vLLM that are replaced."""


async def _read_body(raw_request: Request) -> bytes:
    """The body. It is read before a handler runs, because the handler then watches the
    client's messages.
    """
    return await raw_request.body()


Body = Annotated[bytes, Depends(_read_body)]


def add_routes(app: Any) -> None:
    """Serve the routes from a FastAPI ``app`` of vLLM's."""
    for path, (body_class, form_class) in ROUTES.items():
        complete = with_cancellation(
            load_aware_call(_completer(body_class, form_class))
        )
        app.add_api_route(path, complete, methods=["POST"])
    for path, describe in FACTS.items():
        app.add_api_route(path, _teller(describe), methods=["GET"])
    app.add_api_route(SHOW, _show_model, methods=["POST"])
    app.add_api_route("/health", _show_health, methods=["GET"])
    app.add_api_route("/", _greet, methods=["GET", "HEAD"])


def _completer(body_class: Any, form_class: type[Form]) -> Callable[..., Any]:
    async def complete(body: Body, raw_request: Request) -> Response:
        try:
            read = _parsed(body, body_class)
            answer = await _answer(read, raw_request.app.state)
            form = form_class(read)
            if read.stream:
                events = _events(answer, form)
                return StreamingResponse(events, media_type=form.media_type)
            await answer.complete()
            return JSONResponse(form.whole(answer))
        except Exception as error:
            return _failed(error, form_class)

    return complete


def _failed(error: Exception, form_class: type[Form]) -> JSONResponse:
    """The answer to a failed request."""
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    else:
        failure = create_error_response(error).error
        status, message = failure.code, failure.message
    return JSONResponse(form_class.error(status, message), status)


def _parsed(body: bytes, kind: Any) -> Any:
    """The body as an object of ``kind``, a pydantic class."""
    try:
        fields = json.loads(body)
        json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from None
    try:
        read: BaseModel = kind.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequestError(explain(error, "", kind.model_fields)) from None
    return read


async def _answer(body: Any, state: Any) -> Answer:
    request, request_id = body.request(), f"fim-{random_uuid()}"
    if isinstance(request, CursorRequest):
        return await ask(request, state, request_id)
    if isinstance(request, Merge):
        request = await request.text(state.openai_serving_completion)
    model = body.model or state.openai_serving_models.model_name()
    return Answer(request_id, model, known(request))


async def _events(answer: Answer, form: Form) -> AsyncGenerator[str, None]:
    async with aclosing(answer.parts()) as parts:
        try:
            async for part in parts:
                if (event := form.part(answer, part)) is not None:
                    yield form.event(event)
        except HTTPException as error:
            yield form.event(form.error(error.status_code, str(error.detail)))
        else:
            if (event := form.final(answer)) is not None:
                yield form.event(event)
    yield form.ending


def _served(raw_request: Request) -> tuple[Any, list[str]]:
    """The config of the served model, and its names."""
    models = raw_request.app.state.openai_serving_models
    return models.model_config, [each.name for each in models.base_model_paths]


def _teller(describe: Callable[[Any, list[str]], Any]) -> Callable[..., Any]:
    async def tell(raw_request: Request) -> JSONResponse:
        return JSONResponse(describe(*_served(raw_request)))

    return tell


async def _show_model(body: Body, raw_request: Request) -> JSONResponse:
    config, names = _served(raw_request)
    try:
        body_fields = _parsed(body, ollama.ShowBody)
        name = ollama.model_name(body_fields.model or body_fields.name or "")
        if name not in names:
            raise HTTPException(404, f"model {name!r} not found")
    except Exception as error:
        return _failed(error, ollama.OllamaForm)
    return JSONResponse(ollama.shown(config))


async def _show_health(raw_request: Request) -> JSONResponse:
    """vLLM's health answer, with the body that clients of llama.cpp read."""
    status = (await health(raw_request)).status_code
    return JSONResponse({"status": "ok" if status == 200 else "error"}, status)


async def _greet() -> PlainTextResponse:
    """The text by which clients recognize Ollama's server."""
    return PlainTextResponse("Ollama is running")
