"""``vllm run-batch`` of vLLM 0.32: a file of requests, each of which is answered or
refused separately. vLLM 0.33 refuses a file with an invalid line before it loads a
model.
"""

import asyncio
import json
from typing import Any

from pydantic import ValidationError
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers import run_batch as launcher
from vllm.entrypoints.launchers.run_batch import (
    BatchProgressTracker,
    BatchRequestInput,
    BatchRequestOutput,
    make_error_request_output,
    read_file,
    run_request,
    write_file,
)

from dllm_engine.text import is_text, one_line, parsed_json
from dllm_engine.vllm_hooks.patch import Original, is_ours
from dllm_engine.vllm_hooks.server.settling import CHATS


async def run_by_line(
    run_batch: Original, engine_client: EngineClient, args: Any
) -> None:
    """Answer a file. vLLM parses all lines first, and an invalid line would end the run
    without any answer."""
    if not is_ours(engine_client):
        await run_batch(engine_client, args)
        return
    registry = await launcher.build_endpoint_registry(engine_client, args)
    chats = registry["completions"]
    create = chats["wrapper_fn"](chats["handler_getter"]())
    text = await read_file(args.input_file)
    lines = [line for line in text.split("\n") if line.strip()]
    tracker = BatchProgressTracker()
    for _ in lines:
        tracker.submitted()
    with tracker.pbar():
        outputs = await asyncio.gather(
            *(answer_line(line, create, tracker) for line in lines)
        )
    await write_file(args.output_file, outputs, args.output_tmp_dir)


async def answer_line(
    line: str, create: Any, tracker: BatchProgressTracker
) -> BatchRequestOutput:
    """The record of a line. ``create`` answers a chat."""
    try:
        request = _read(line)
    except ValueError as error:
        tracker.completed()
        named = BatchRequestInput.model_construct(custom_id=_name(line))
        return make_error_request_output(named, one_line(error))
    return await run_request(create, request, tracker)


def _read(line: str) -> BatchRequestInput:
    """Read a line. Raises ``ValueError`` if it is not a request for a chat."""
    fields = parsed_json(line)
    if not is_text(json.dumps(fields, ensure_ascii=False)):
        raise ValueError("its text must be valid Unicode")
    url = fields.get("url") if isinstance(fields, dict) else None
    if url is not None and url != CHATS:
        raise ValueError(f"url={url!r}: lines are answered for {CHATS} only")
    try:
        return BatchRequestInput.model_validate(fields)
    except ValidationError as error:
        faults = (
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
            for fault in error.errors()
        )
        raise ValueError("; ".join(faults)) from None
    except TypeError as error:  # The error of a check that expects a list.
        raise ValueError(f"body: {error}") from None


def _name(line: str) -> str:
    """The line's ``custom_id``; an empty text if it cannot be read."""
    try:
        fields = parsed_json(line)
    except ValueError:
        return ""
    name = fields.get("custom_id") if isinstance(fields, dict) else None
    return name if isinstance(name, str) and is_text(name) else ""
