"""Chats of a file (``vllm run-batch``), answered as over HTTP."""

from functools import partial
from typing import Any

from dllm_engine.params import check_place
from dllm_engine.structured_output.tool_calls import serve_tool_calls
from dllm_engine.vllm_hooks.patch import Original, is_ours
from dllm_engine.vllm_hooks.server.open_requests import OpenRequest, open_request
from dllm_engine.vllm_hooks.server.responses import choice_fields
from dllm_engine.vllm_hooks.server.settling import CHATS, settle


async def answer_as_over_http(build: Original, engine_client: Any, args: Any) -> Any:
    """Answer the chats of a file as over HTTP. vLLM has no application for a file, so
    no middleware sees its requests.
    """
    if not is_ours(engine_client):
        return await build(engine_client, args)
    serve_tool_calls(args, engine_client.vllm_config.model_config)
    registry = await build(engine_client, args)
    registry["completions"]["wrapper_fn"] = lambda create: partial(
        _answer, create.__self__
    )
    return registry


async def _answer(chats: Any, request: Any) -> Any:
    """Answer a chat as the server does over HTTP."""
    check_place(request.model_extra or {})
    current_request = OpenRequest(CHATS)
    open_request.set(current_request)
    await settle(request, chats, current_request)
    response = await chats.create_chat_completion(request)
    choices = getattr(response, "choices", ())  # An error has none.
    all_fields = choice_fields(current_request, chats.renderer.tokenizer)
    for choice, fields in zip(choices, all_fields, strict=False):
        for name, value in fields.items():
            setattr(choice, name, value)
    return response
