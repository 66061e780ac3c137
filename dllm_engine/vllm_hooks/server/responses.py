"""Fields that HTTP responses carry beside OpenAI's, in completions and chat completions alike.

``choices[i].diffusion`` holds the figures of a choice. A streamed response has them in every chunk that brings tokens,
counted up to that chunk; the last chunk has those of the whole response.

``provisional`` is for responses that stream by step. Chunks of their own say what each denoising step changed in the
running block. They bring no text and no tokens, so they have no choices, and clients that do not know them skip them.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import anyio
from openai.types.responses import ResponseErrorEvent
from pydantic import ValidationError
from vllm.exceptions import GenerationError
from vllm.v1.engine.exceptions import EngineDeadError

from dllm_engine.figures import PER_TOKEN, ErrorReason
from dllm_engine.infill.http import template_fields
from dllm_engine.provisional import BlockChanges
from dllm_engine.scheduler.messages import PROVISIONAL_KEY
from dllm_engine.scheduler.options.request_fields import RequestOptions
from dllm_engine.scheduler.options.request_options import DEFAULT_GEN_LENGTH
from dllm_engine.vllm_hooks.patch import Original, is_ours

DIFFUSION = "diffusion"
_EVENT, _DONE = "data: ", "[DONE]"


def fields_of(completion: Any, *, with_trace: bool) -> dict[str, Any]:
    """The fields of a choice. What grows with the response, only the whole of it has."""
    figures = getattr(completion, DIFFUSION, None)
    if figures is None:
        return {}
    fields = figures.to_json()
    if completion.finish_reason is None:
        left_out: tuple[str, ...] = ("trace", *PER_TOKEN)
    else:
        left_out = () if with_trace else ("trace",)
    return {DIFFUSION: {name: value for name, value in fields.items() if name not in left_out}}


class StreamFields:
    """Adds our fields to the chunks that vLLM makes of one response, and makes those that show running blocks."""

    def __init__(self, head: dict[str, Any], *, with_trace: bool = False) -> None:
        """``head``: the fields that all chunks share."""
        self._head = head
        self._with_trace = with_trace
        self._of_choice: dict[int, dict[str, Any]] = {}
        self._changes: dict[int, BlockChanges] = {}

    def note(self, choices: list[tuple[int, Any]]) -> None:
        """Remember the completions that vLLM is going to make chunks of."""
        self._of_choice = {index: fields_of(completion, with_trace=self._with_trace) for index, completion in choices}

    def add_to(self, event: str) -> str:
        """A server-sent event of vLLM's, with our fields in the choices that bring tokens."""
        data = event.removeprefix(_EVENT).rstrip()
        if not event.startswith(_EVENT) or data == _DONE:
            return event
        chunk = json.loads(data)
        added = False
        for choice in chunk.get("choices", ()):
            # Chat begins with a chunk that only names the role.
            fields = self._of_choice.get(choice["index"]) if "role" not in choice.get("delta", ()) else None
            if fields:
                choice |= fields
                added = True
        return _event_of(chunk) if added else event

    def show(self, index: int, completion: Any) -> str:
        """An event of our own: what changed in a choice's running block since the last one."""
        changes = self._changes.setdefault(index, BlockChanges()).to(completion.provisional)
        figures = fields_of(completion, with_trace=False)
        return _event_of({**self._head, "choices": [], PROVISIONAL_KEY: {"index": index, **changes, **figures}})


def _event_of(chunk: dict[str, Any]) -> str:
    return f"{_EVENT}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def stream_with_fields(
    make_events: Callable[[AsyncIterator[Any]], AsyncGenerator[str, None]],
    results: AsyncIterator[Any],
    choices_of: Callable[[Any], list[tuple[int, Any]]],
    fields: StreamFields,
) -> AsyncGenerator[str, None]:
    """vLLM's stream of a response with our fields and chunks.

    vLLM's generator pulls a result and yields its chunks, or none if nothing is new. It runs in a task of its own, so
    that our chunks can be sent while it waits for the next result. It turns an error of the results into an event.

    Args:
        make_events: vLLM's generator of server-sent events from the engine's results.
        results: the engine's results.
        choices_of: the (choice, completion) pairs of a result.
        fields: what to add.
    """
    send, receive = anyio.create_memory_object_stream[str](0)

    async def passed_on() -> AsyncGenerator[Any, None]:
        complete: dict[int, bool] = {}
        async for result in results:
            choices = choices_of(result)
            complete |= {index: c.finish_reason is not None for index, c in choices}
            if any(c.finish_reason == "abort" for _, c in choices):
                break
            shown = [(index, c) for index, c in choices if getattr(c, PROVISIONAL_KEY, None) is not None]
            for index, completion in shown:
                await send.send(fields.show(index, completion))
            settled = [(index, c) for index, c in choices if c.token_ids or c.finish_reason is not None]
            if settled or not shown:
                fields.note(choices)
                yield result
        else:
            if complete and all(complete.values()):
                return
        # vLLM would end the stream as if the response were complete.
        raise GenerationError("the server ended the request before its response was complete")

    async def run() -> None:
        async with send, aclosing(make_events(passed_on())) as events:
            async for event in events:
                await send.send(fields.add_to(event))

    task = asyncio.create_task(run())
    try:
        async for event in receive:
            yield event
        await task
    finally:
        receive.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def stream_completion_with_fields(
    stream_completion: Original,
    self: Any,
    request: Any,
    engine_inputs: Any,
    result_generator: Any,
    request_id: str,
    created_time: int,
    model_name: str,
    *args: Any,
    **kwargs: Any,
) -> AsyncGenerator[str, None]:
    def events(results: AsyncIterator[Any]) -> AsyncGenerator[str, None]:
        return stream_completion(
            self, request, engine_inputs, results, request_id, created_time, model_name, *args, **kwargs
        )

    if not is_ours(self):
        return events(result_generator)
    _settle_length(request)
    num_choices = request.n or 1
    head = {"id": request_id, "object": "text_completion", "created": created_time, "model": model_name}
    fields = StreamFields(head, with_trace=_asks_for_trace(request))
    return stream_with_fields(
        events, result_generator, lambda r: [(c.index + r[0] * num_choices, c) for c in r[1].outputs], fields
    )


def stream_chat_with_fields(
    stream_chat: Original,
    self: Any,
    request: Any,
    result_generator: Any,
    request_id: str,
    model_name: str,
    *args: Any,
    **kwargs: Any,
) -> AsyncGenerator[str, None]:
    def events(results: AsyncIterator[Any]) -> AsyncGenerator[str, None]:
        return stream_chat(self, request, results, request_id, model_name, *args, **kwargs)

    if not is_ours(self):
        return events(result_generator)
    created = int(time.time())  # as vLLM's own chunks, which say when the stream began
    head = {"id": request_id, "object": "chat.completion.chunk", "created": created, "model": model_name}
    fields = StreamFields(head, with_trace=_asks_for_trace(request))
    return stream_with_fields(events, result_generator, lambda r: [(c.index, c) for c in r.outputs], fields)


def _settle_length(request: Any) -> None:
    """Set the length that a completion left open: vLLM asserts that there is one when it writes the response."""
    if request.max_tokens is None:
        request.max_tokens = DEFAULT_GEN_LENGTH


def complete_with_fields(
    to_response: Original, self: Any, final_res_batch: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    _settle_length(request)
    response = to_response(self, final_res_batch, request, *args, **kwargs)
    completions = [completion for result in final_res_batch for completion in result.outputs]
    for choice, completion in zip(response.choices, completions, strict=True):
        _set_fields(self, choice, completion, request)
    return response


async def complete_chat_with_fields(
    to_response: Original, self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
) -> Any:
    completions: dict[int, Any] = {}

    async def noted() -> AsyncGenerator[Any, None]:
        async for result in result_generator:
            completions.update((completion.index, completion) for completion in result.outputs)
            yield result

    response = await to_response(self, request, noted(), *args, **kwargs)
    for choice in getattr(response, "choices", ()):  # an error has none
        _set_fields(self, choice, completions[choice.index], request)
    return response


def raise_with_reason(raise_if_error: Original, self: Any, finish_reason: str | None, request_id: str) -> None:
    """vLLM's check of a finish reason, which becomes HTTP status 500 or an event in a stream."""
    if isinstance(finish_reason, ErrorReason):
        raise GenerationError(finish_reason.explanation)
    raise_if_error(self, finish_reason, request_id)


async def end_responses_stream(
    stream: Original,
    self: Any,
    request: Any,
    sampling_params: Any,
    result_generator: AsyncIterator[Any],
    *args: Any,
    **kwargs: Any,
) -> AsyncGenerator[Any, None]:
    """vLLM's stream of ``/v1/responses`` has no event for an error: an error would break the stream off."""
    failure, last = None, -1

    async def noted() -> AsyncGenerator[Any, None]:
        nonlocal failure
        try:
            async for context in result_generator:
                outputs = getattr(getattr(context, "last_output", None), "outputs", None) or ()
                reasons = (output.finish_reason for output in outputs)
                failure = next((r.explanation for r in reasons if isinstance(r, ErrorReason)), None)
                yield context
        except (GenerationError, EngineDeadError) as error:
            failure = str(error)
            raise

    try:
        async for event in stream(self, request, sampling_params, noted(), *args, **kwargs):
            last = event.sequence_number
            yield event
    except (ValidationError, EngineDeadError):
        if failure is None or not is_ours(self):
            raise
        yield ResponseErrorEvent(
            type="error", code="server_error", message=failure, param=None, sequence_number=last + 1
        )


def _asks_for_trace(request: Any) -> bool:
    """The option itself was checked when the request was admitted."""
    return bool(RequestOptions(trace=(request.vllm_xargs or {}).get("trace")).trace)


def _set_fields(serving: Any, choice: Any, completion: Any, request: Any) -> None:
    """vLLM's response models keep fields that they do not know."""
    fields = fields_of(completion, with_trace=_asks_for_trace(request))
    fields |= template_fields(completion, request, serving)
    for name, value in fields.items():
        setattr(choice, name, value)
