"""``vllm run-batch``: a file of requests, each answered or refused by itself."""

import asyncio
import json
from functools import partial
from typing import Any

from pydantic import ValidationError
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.run_batch import (
    BatchProgressTracker,
    BatchRequestInput,
    BatchRequestOutput,
    build_endpoint_registry,
    make_error_request_output,
    read_file,
    run_request,
    write_file,
)

from dllm_engine.params import check_place
from dllm_engine.structured_output.tool_calls import serve_tool_calls
from dllm_engine.text import is_text, one_line, parsed_json
from dllm_engine.vllm_hooks.patch import Original, is_ours
from dllm_engine.vllm_hooks.server.open_requests import OpenRequest, open_request
from dllm_engine.vllm_hooks.server.responses import choice_fields
from dllm_engine.vllm_hooks.server.settling import settle

ROUTE = "/v1/chat/completions"
"""What lines may ask."""


async def run_by_line(
    run_batch: Original, engine_client: EngineClient, args: Any
) -> None:
    """Answer a file. vLLM parses all lines first, and one that it cannot read ends the
    run without an answer to any."""
    if not is_ours(engine_client):
        await run_batch(engine_client, args)
        return
    serve_tool_calls(args, engine_client.vllm_config.model_config)
    registry = await build_endpoint_registry(engine_client, args)
    chats = registry["completions"]["handler_getter"]().__self__
    text = await read_file(args.input_file)
    lines = [line for line in text.split("\n") if line.strip()]
    tracker = BatchProgressTracker()
    for _ in lines:
        tracker.submitted()
    with tracker.pbar():
        outputs = await asyncio.gather(
            *(answer_line(line, chats, tracker) for line in lines)
        )
    await write_file(args.output_file, outputs, args.output_tmp_dir)


async def answer_line(
    line: str, chats: Any, tracker: BatchProgressTracker
) -> BatchRequestOutput:
    """The record of a line. ``chats``: what answers them."""
    try:
        request = _read(line)
    except ValueError as error:
        tracker.completed()
        named = BatchRequestInput.model_construct(custom_id=_name(line))
        return make_error_request_output(named, one_line(error))
    return await run_request(partial(_answer, chats), request, tracker)


async def _answer(chats: Any, request: Any) -> Any:
    """What the server answers over HTTP."""
    check_place(request.model_extra or {})
    asked = OpenRequest(ROUTE)
    open_request.set(asked)
    await settle(request, chats, asked)
    response = await chats.create_chat_completion(request)
    choices = getattr(response, "choices", ())  # an error has none
    all_fields = choice_fields(asked, chats.renderer.tokenizer)
    for choice, fields in zip(choices, all_fields, strict=False):
        for name, value in fields.items():
            setattr(choice, name, value)
    return response


def _read(line: str) -> BatchRequestInput:
    """Raises ``ValueError`` for a line that is no request for a chat."""
    fields = parsed_json(line)
    if not is_text(json.dumps(fields, ensure_ascii=False)):
        raise ValueError("its text must be valid Unicode")
    url = fields.get("url") if isinstance(fields, dict) else None
    if url is not None and url != ROUTE:
        raise ValueError(f"url={url!r}: lines are answered for {ROUTE} only")
    try:
        return BatchRequestInput.model_validate(fields)
    except ValidationError as error:
        faults = (
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
            for fault in error.errors()
        )
        raise ValueError("; ".join(faults)) from None
    except TypeError as error:  # of a check that expects a list
        raise ValueError(f"body: {error}") from None


def _name(line: str) -> str:
    """The line's ``custom_id``; an empty text where it cannot be read."""
    try:
        fields = parsed_json(line)
    except ValueError:
        return ""
    name = fields.get("custom_id") if isinstance(fields, dict) else None
    return name if isinstance(name, str) and is_text(name) else ""
