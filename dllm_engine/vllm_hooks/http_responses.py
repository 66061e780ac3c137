"""What HTTP responses carry beside OpenAI's fields, in completions and chat completions alike.

``choices[i].diffusion``: the figures of that choice. A streamed response has them in every chunk, up to where the chunk
is; the last one's figures are those of the response.

``choices[i].provisional``: in a response that streams by step, chunks of their own show the running block after each
denoising step. They bring no text and no tokens; a client that does not know them reads on.
"""

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import anyio

DIFFUSION, PROVISIONAL = "diffusion", "provisional"
_EVENT, _DONE = "data: ", "[DONE]"
_HEAD = ("id", "object", "created", "model")


def fields_of(completion: Any) -> dict[str, Any]:
    """The fields of a choice; the trace, which grows with every step, only with the whole response."""
    figures = getattr(completion, DIFFUSION, None)
    if figures is None:
        return {}
    fields = figures.to_json()
    if completion.finish_reason is None:
        fields.pop("trace", None)
    return {DIFFUSION: fields}


class StreamFields:
    """Adds our fields to the chunks that vLLM makes of one response, and makes those that show provisional blocks."""

    def __init__(self, empty_choice: dict[str, Any], head: dict[str, Any] | None = None) -> None:
        """``empty_choice`` is a choice that brings nothing. ``head`` is what all chunks share; where it is not given it
        is taken from vLLM's first one."""
        self._empty_choice = empty_choice
        self._head = head
        self._of_choice: dict[int, dict[str, Any]] = {}

    def note(self, choices: list[tuple[int, Any]]) -> None:
        """Remember the completions that vLLM is going to make chunks of."""
        self._of_choice = {index: fields_of(completion) for index, completion in choices}

    def add_to(self, event: str) -> str:
        """A server-sent event of vLLM's, with the fields of the choices that it brings tokens of."""
        data = event.removeprefix(_EVENT).rstrip()
        if not event.startswith(_EVENT) or data == _DONE:
            return event
        chunk = json.loads(data)
        if self._head is None:
            self._head = {name: chunk[name] for name in _HEAD if name in chunk}
        added = False
        for choice in chunk.get("choices", ()):
            # Chat begins with a chunk that only names the role.
            fields = self._of_choice.get(choice["index"]) if "role" not in choice.get("delta", ()) else None
            if fields:
                choice |= fields
                added = True
        return _event_of(chunk) if added else event

    def show(self, index: int, completion: Any) -> str:
        """An event of our own with the provisional block of a choice."""
        block = {PROVISIONAL: completion.provisional.to_json()}
        choice = {"index": index, **self._empty_choice, **fields_of(completion), **block}
        return _event_of({**(self._head or {}), "choices": [choice]})


def _event_of(chunk: dict[str, Any]) -> str:
    return f"{_EVENT}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def stream_with_fields(
    make_events: Callable[[AsyncIterator[Any]], AsyncGenerator[str, None]],
    results: AsyncIterator[Any],
    choices_of: Callable[[Any], list[tuple[int, Any]]],
    emptied: Callable[[Any], Any],
    fields: StreamFields,
) -> AsyncGenerator[str, None]:
    """vLLM's stream of a response with our fields and chunks.

    vLLM's generator pulls a result and yields chunks of it, none where there is nothing new. So that ours can come
    while it waits for the next result, it runs in a task of its own.

    Args:
        make_events: vLLM's generator of server-sent events from the engine's results.
        results: the engine's results.
        choices_of: the (choice, completion) pairs of a result.
        emptied: a result without its completions.
        fields: what to add.
    """
    send, receive = anyio.create_memory_object_stream[str](0)

    async def passed_on() -> AsyncGenerator[Any, None]:
        opened = False
        async for result in results:
            choices = choices_of(result)
            shown = [(index, c) for index, c in choices if getattr(c, PROVISIONAL, None) is not None]
            if shown and not opened:
                yield emptied(result)  # for vLLM to begin, in chat with the role
            opened = True
            for index, completion in shown:
                await send.send(fields.show(index, completion))
            settled = [(index, c) for index, c in choices if c.token_ids or c.finish_reason is not None]
            if settled or not shown:
                fields.note(choices)
                yield result

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


def _without_completions(result: Any) -> Any:
    result = copy.copy(result)
    result.outputs = []
    return result


def completion_stream(stream_completion: Callable[..., Any]) -> Callable[..., Any]:
    def completion_stream_generator(
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
            made: AsyncGenerator[str, None] = stream_completion(
                self, request, engine_inputs, results, request_id, created_time, model_name, *args, **kwargs
            )
            return made

        if not _is_ours(self):
            return events(result_generator)
        num_choices = request.n or 1
        head = {"id": request_id, "object": "text_completion", "created": created_time, "model": model_name}
        return stream_with_fields(
            events,
            result_generator,
            lambda result: [(c.index + result[0] * num_choices, c) for c in result[1].outputs],
            lambda result: (result[0], _without_completions(result[1])),
            StreamFields({"text": "", "logprobs": None, "finish_reason": None}, head),
        )

    return completion_stream_generator


def chat_stream(stream_chat: Callable[..., Any]) -> Callable[..., Any]:
    def chat_completion_stream_generator(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        if not _is_ours(self):
            events: AsyncGenerator[str, None] = stream_chat(self, request, result_generator, *args, **kwargs)
            return events
        return stream_with_fields(
            lambda results: stream_chat(self, request, results, *args, **kwargs),
            result_generator,
            lambda result: [(c.index, c) for c in result.outputs],
            _without_completions,
            StreamFields({"delta": {}, "logprobs": None, "finish_reason": None}),
        )

    return chat_completion_stream_generator


def whole_completion(to_response: Callable[..., Any]) -> Callable[..., Any]:
    def request_output_to_completion_response(self: Any, final_res_batch: Any, *args: Any, **kwargs: Any) -> Any:
        response = to_response(self, final_res_batch, *args, **kwargs)
        completions = [completion for result in final_res_batch for completion in result.outputs]
        for choice, completion in zip(response.choices, completions, strict=True):
            _set_fields(choice, completion)
        return response

    return request_output_to_completion_response


def whole_chat(to_response: Callable[..., Any]) -> Callable[..., Any]:
    async def chat_completion_full_generator(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        completions: dict[int, Any] = {}

        async def noted() -> AsyncGenerator[Any, None]:
            async for result in result_generator:
                completions.update((completion.index, completion) for completion in result.outputs)
                yield result

        response = await to_response(self, request, noted(), *args, **kwargs)
        for choice in getattr(response, "choices", ()):  # an error has none
            _set_fields(choice, completions[choice.index])
        return response

    return chat_completion_full_generator


def _is_ours(serving: Any) -> bool:
    return getattr(serving.model_config, "is_dllm_engine", False)


def _set_fields(choice: Any, completion: Any) -> None:
    """vLLM's response models keep fields that they do not know."""
    for name, value in fields_of(completion).items():
        setattr(choice, name, value)
