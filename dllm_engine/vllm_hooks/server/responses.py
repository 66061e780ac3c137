"""Fields that HTTP responses carry beside OpenAI's, in completions and chat completions
alike.

``choices[i].diffusion`` has the figures of a choice, in a stream up to its chunk.
``provisional`` has the changes of a denoising step in the running block, in separate
chunks, for responses that stream by step. These chunks have no choices, so that other
clients skip them.
"""

import asyncio
import inspect
import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from dllm_engine.decoding.messages import PROVISIONAL_KEY
from dllm_engine.figures import PER_TOKEN
from dllm_engine.infill.http import template_fields
from dllm_engine.provisional import BlockChanges
from dllm_engine.request_options.fields import RequestOptions
from dllm_engine.vllm_hooks.output_processor import shown_blocks
from dllm_engine.vllm_hooks.patch import Original, is_ours
from dllm_engine.vllm_hooks.release import is_installed
from dllm_engine.vllm_hooks.server.open_requests import OpenRequest

DIFFUSION = "diffusion"
_EVENT = "data: "
# vLLM 0.32 sends no chunk of a response that ends without a token.
_ENDS_ARE_MISSING = is_installed("0.32")
WITH_FIGURES = ("/v1/completions", "/v1/chat/completions", "/invocations")


def fields_of(completion: Any, *, with_trace: bool) -> dict[str, Any]:
    """The fields of a choice. Only a complete response has fields that grow with its
    length.
    """
    figures = getattr(completion, DIFFUSION, None)
    if figures is None:
        return {}
    left_out = set() if completion.finish_reason is not None else {"trace", *PER_TOKEN}
    left_out |= set() if with_trace else {"trace"}
    return {
        DIFFUSION: {
            name: value
            for name, value in figures.to_json().items()
            if name not in left_out
        }
    }


def _event_of(chunk: dict[str, Any]) -> str:
    return f"{_EVENT}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def stream_response(
    stream: Original, self: Any, request: Any, *args: Any, **kwargs: Any
) -> AsyncGenerator[str, None]:
    """Add figures and provisional blocks to the chunks of a completion or a chat
    completion.
    """
    if not is_ours(self):
        return stream(self, request, *args, **kwargs)
    return stream_with_fields(
        stream, inspect.signature(stream).bind(self, request, *args, **kwargs).arguments
    )


async def stream_with_fields(
    stream: Original, arguments: dict[str, Any]
) -> AsyncGenerator[str, None]:
    """vLLM's ``stream`` with these ``arguments``, with our fields and with chunks that
    show running blocks. vLLM's stream runs in a separate task, so that our chunks can
    be sent while it waits for the next result."""
    send, receive = anyio.create_memory_object_stream[str](0)
    task = asyncio.create_task(_Chunks(arguments, send).send_all(stream))
    try:
        async for event in receive:
            yield event
        await task
    finally:
        receive.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Chunks:
    """Chunks of a response: those of vLLM with our fields, and ours."""

    def __init__(
        self, arguments: dict[str, Any], send: MemoryObjectSendStream[str]
    ) -> None:
        self.arguments = arguments
        self.send = send
        self.with_trace = _asks_for_trace(arguments["request"].vllm_xargs)
        # vLLM's method for chats has no ``created_time``.
        self.is_chat = "created_time" not in arguments
        self.head = {
            "id": arguments["request_id"],
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "created": int(time.time()) if self.is_chat else arguments["created_time"],
            "model": arguments["model_name"],
        }
        self.changes: defaultdict[int, BlockChanges] = defaultdict(BlockChanges)
        self.fields: dict[int, dict[str, Any]] = {}
        """Fields of each choice, for the completions from which vLLM makes chunks next.
        """
        self.begun: set[int] = set()
        """Choices that have tokens already."""

    async def send_all(self, stream: Original) -> None:
        """Send vLLM's chunks with our fields. vLLM asks for results between them."""
        arguments = {**self.arguments, "result_generator": self._results()}
        async with self.send, aclosing(stream(**arguments)) as events:
            async for event in events:
                await self.send.send(_with_fields(event, self.fields))

    async def _results(self) -> AsyncGenerator[Any, None]:
        """The results of which vLLM makes chunks. Before each of them, ours are sent."""
        num_choices = self.arguments["request"].n or 1
        async for result in self.arguments["result_generator"]:
            prompt, output = (0, result) if self.is_chat else result
            choices = [(c.index + prompt * num_choices, c) for c in output.outputs]
            shows = await self._show_blocks(choices)
            if shows and not any(
                c.token_ids or c.finish_reason is not None for _, c in choices
            ):
                continue
            self.fields = {
                index: fields_of(c, with_trace=self.with_trace) for index, c in choices
            }
            yield result
            self.begun.update(index for index, c in choices if c.token_ids)
            if _ENDS_ARE_MISSING:
                await self._end_without_tokens(choices)

    async def _show_blocks(self, choices: list[tuple[int, Any]]) -> bool:
        """Send the changes of running blocks. Returns False if there are none."""
        shown = [(index, block, c) for index, c in choices for block in shown_blocks(c)]
        for index, block, c in shown:
            step = {
                "index": index,
                **self.changes[index].to(block),
                **fields_of(c, with_trace=False),
            }
            await self._send({"choices": [], PROVISIONAL_KEY: step})
        return bool(shown)

    async def _end_without_tokens(self, choices: list[tuple[int, Any]]) -> None:
        """Send the ends of choices that have no token."""
        nothing: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        ends = [
            {"index": index, **nothing, "finish_reason": c.finish_reason}
            for index, c in choices
            if c.finish_reason is not None and index not in self.begun
        ]
        if ends:
            await self._send({"choices": ends})

    async def _send(self, chunk: dict[str, Any]) -> None:
        await self.send.send(_event_of({**self.head, **chunk}))


def _with_fields(event: str, fields: dict[int, dict[str, Any]]) -> str:
    """A server-sent event of vLLM, with our fields in the choices that bring tokens."""
    if not event.startswith(f"{_EVENT}{{"):
        return event
    chunk = json.loads(event.removeprefix(_EVENT))
    # A chat begins with a chunk that has only the role.
    choices = [
        choice
        for choice in chunk.get("choices", ())
        if "role" not in choice.get("delta", ())
    ]
    for choice in choices:
        choice |= fields.get(choice["index"], {})
    return _event_of(chunk) if any(DIFFUSION in choice for choice in choices) else event


def _asks_for_trace(options: Mapping[str, Any] | None) -> bool:
    """Return True if options of a request ask for the trace. They were checked when the
    request was admitted.
    """
    return bool(RequestOptions(trace=(options or {}).get("trace")).trace)


def with_figures(current_request: OpenRequest, tokenizer: Any, body: bytes) -> Any:
    """A completion or chat completion with the figures of its choices."""
    response = json.loads(body)
    if response is None:  # vLLM's answer to a client that has left.
        return None
    fields = choice_fields(current_request, tokenizer)
    for choice, own in zip(response["choices"], fields, strict=True):
        choice |= own
    return response


def choice_fields(current_request: OpenRequest, tokenizer: Any) -> list[dict[str, Any]]:
    """The fields of each choice of a response that is complete."""
    fields = []
    for place, latest in enumerate(current_request.latest):
        if latest is None:
            continue
        params, output = latest
        filling = current_request.filling
        sizes = filling.hole_sizes.get(place) if filling else current_request.hole_sizes
        options = params.extra_args or {}
        with_trace = _asks_for_trace(options)
        for completion in output.outputs:
            holes = template_fields(completion, options, tokenizer, sizes)
            fields.append(fields_of(completion, with_trace=with_trace) | holes)
    return fields
