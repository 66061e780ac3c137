"""What HTTP responses carry beside OpenAI's fields: ``choices[i].diffusion``, the figures of that choice.

The same in completions and chat completions, whole or streamed. A streamed response has it in every chunk that brings
tokens, up to the block that the chunk ends; the last one's figures are those of the response.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any

FIELD = "diffusion"
_EVENT, _DONE = "data: ", "[DONE]"


class ChoiceFields:
    """The fields of each choice, as of the engine output that the server is turning into chunks."""

    def __init__(self) -> None:
        self._of_choice: dict[int, dict[str, Any]] = {}

    def note(self, outputs: Iterable[tuple[int, Any]]) -> None:
        """Remember the completion of each choice."""
        self._of_choice = {index: fields_of(completion) for index, completion in outputs}

    def add_to(self, event: str) -> str:
        """A server-sent event with the fields of its choices; one that brings no tokens stays as it is."""
        data = event.removeprefix(_EVENT).rstrip()
        if not self._of_choice or not event.startswith(_EVENT) or data == _DONE:
            return event
        chunk = json.loads(data)
        choices = [c for c in chunk.get("choices", ()) if "role" not in c.get("delta", ()) and c["index"] in self]
        if not choices:
            return event
        for choice in choices:
            choice |= self._of_choice[choice["index"]]
        return f"{_EVENT}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"

    def __contains__(self, index: int) -> bool:
        return bool(self._of_choice.get(index))


def fields_of(completion: Any) -> dict[str, Any]:
    """The fields of a choice; the trace, which grows with every step, only with the whole response."""
    figures = getattr(completion, "diffusion", None)
    if figures is None:
        return {}
    fields = figures.to_json()
    if completion.finish_reason is None:
        fields.pop("trace", None)
    return {FIELD: fields}


async def add_to_stream(
    make_events: Callable[[AsyncIterator[Any]], AsyncGenerator[str, None]],
    results: AsyncIterator[Any],
    choices_of: Callable[[Any], list[tuple[int, Any]]],
) -> AsyncGenerator[str, None]:
    """vLLM's stream of a response with our fields.

    Args:
        make_events: vLLM's generator of server-sent events from the engine's results.
        results: the engine's results.
        choices_of: the (choice, completion) pairs of a result.
    """
    fields = ChoiceFields()

    async def noted() -> AsyncGenerator[Any, None]:
        async for result in results:
            fields.note(choices_of(result))
            yield result

    async with aclosing(make_events(noted())) as events:
        async for event in events:
            yield fields.add_to(event)


def install() -> None:
    """Make vLLM's HTTP server add the fields. Idempotent; responses of other models are untouched."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    if getattr(OpenAIServingChat, "_dllm_fields", False):
        return
    stream_completion = OpenAIServingCompletion.completion_stream_generator
    stream_chat = OpenAIServingChat.chat_completion_stream_generator
    whole_completion = OpenAIServingCompletion.request_output_to_completion_response
    whole_chat = OpenAIServingChat.chat_completion_full_generator

    def completion_stream_generator(
        self: Any, request: Any, engine_inputs: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        num_choices = request.n or 1
        return add_to_stream(
            lambda results: stream_completion(self, request, engine_inputs, results, *args, **kwargs),
            result_generator,
            lambda result: [(c.index + result[0] * num_choices, c) for c in result[1].outputs],
        )

    def chat_completion_stream_generator(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        return add_to_stream(
            lambda results: stream_chat(self, request, results, *args, **kwargs),
            result_generator,
            lambda result: [(c.index, c) for c in result.outputs],
        )

    def request_output_to_completion_response(self: Any, final_res_batch: Any, *args: Any, **kwargs: Any) -> Any:
        response = whole_completion(self, final_res_batch, *args, **kwargs)
        completions = [completion for result in final_res_batch for completion in result.outputs]
        for choice, completion in zip(response.choices, completions, strict=True):
            _set_fields(choice, completion)
        return response

    async def chat_completion_full_generator(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        completions: dict[int, Any] = {}

        async def noted() -> AsyncGenerator[Any, None]:
            async for result in result_generator:
                completions.update((completion.index, completion) for completion in result.outputs)
                yield result

        response = await whole_chat(self, request, noted(), *args, **kwargs)
        for choice in getattr(response, "choices", ()):  # an error has none
            _set_fields(choice, completions[choice.index])
        return response

    OpenAIServingCompletion.completion_stream_generator = completion_stream_generator
    OpenAIServingChat.chat_completion_stream_generator = chat_completion_stream_generator
    OpenAIServingCompletion.request_output_to_completion_response = request_output_to_completion_response
    OpenAIServingChat.chat_completion_full_generator = chat_completion_full_generator
    OpenAIServingChat._dllm_fields = True


def _set_fields(choice: Any, completion: Any) -> None:
    """vLLM's response models keep fields that they do not know."""
    for name, value in fields_of(completion).items():
        setattr(choice, name, value)
