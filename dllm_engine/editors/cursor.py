"""A completion at a cursor, as every route of editors asks for it, and its answer."""

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastapi import HTTPException
from pydantic import BaseModel
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from dllm_engine.editors.completions import around_cursor
from dllm_engine.editors.markers import file_text
from dllm_engine.vllm_hooks.server.open_requests import open_request
from dllm_engine.vllm_hooks.server.settling import COMPLETIONS, settled_fields


@dataclass(frozen=True)
class CursorRequest:
    """A completion that is asked for at a cursor."""

    prefix: str
    suffix: str | None = ""
    """None: the prefix may be a prompt with markers."""
    context: Sequence[tuple[str, str]] = ()
    """Other files, by path."""
    budget: int | None = None
    """Most tokens."""
    stops: Sequence[str] = ()
    num_choices: int = 1
    model: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of ``/v1/completions``."""

    def fields(self, serving: Any) -> dict[str, Any]:
        """The body of ``/v1/completions`` that asks for it."""
        prefix, suffix = self.prefix, self.suffix
        if suffix is None:
            prefix, suffix = around_cursor(prefix, serving)
        files = "".join(file_text(path, text) for path, text in self.context)
        # Behind the last line, no length differs: greedy completions would be equal.
        is_greedy = not suffix.strip() and not self.sampling.get("temperature")
        chosen = {name: x for name, x in self.sampling.items() if x is not None}
        return {
            **chosen,
            "prompt": files + prefix,
            "suffix": suffix,
            "max_tokens": self.budget,
            "n": 1 if is_greedy else self.num_choices,
            "model": self.model,
        }


class SamplingFields(BaseModel):
    """Fields of bodies that say how to sample and where to stop. Fields that are not
    declared are ignored.
    """

    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of ``/v1/completions``. A seed below 0 is none."""
        fields = self.model_dump(include={"temperature", "top_p", "top_k"})
        is_seeded = self.seed is not None and self.seed >= 0
        return fields | {"seed": self.seed if is_seeded else None}


class Part(NamedTuple):
    """A part of one choice of a streamed answer."""

    choice: int
    text: str
    finish_reason: str | None
    created: int


@dataclass
class Answer:
    """The parts of an answer as they come, and its usage once it is complete."""

    id: str
    model: str
    events: AsyncGenerator[str, None] | None = None
    known: str = ""
    """The text, if there are no events."""
    usage: dict[str, int] = field(default_factory=dict)

    async def parts(self) -> AsyncGenerator[Part, None]:
        """Raises ``HTTPException`` for what ends the answer with an error."""
        if self.events is None:
            yield Part(0, self.known, "stop", int(time.time()))
            return
        async with aclosing(self.events) as events:
            async for event in events:
                data = event.removeprefix("data: ").strip()
                if not data.startswith("{"):
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    error = chunk["error"]
                    raise HTTPException(int(error["code"]), error["message"])
                self.usage = chunk.get("usage") or self.usage
                for choice in chunk.get("choices", ()):
                    yield Part(
                        choice["index"],
                        choice.get("text") or "",
                        choice.get("finish_reason"),
                        chunk["created"],
                    )


class Choice(NamedTuple):
    """One choice of a complete answer."""

    text: str
    finish_reason: str


async def ask(request: CursorRequest, state: Any, request_id: str) -> Answer:
    """The answer to a request. ``state``: of vLLM's application. Raises
    ``HTTPException`` and ``InvalidRequestError`` for what cannot be served.
    """
    serving, asked = state.openai_serving_completion, open_request.get()
    assert asked is not None, "Answers is in front"
    fields = request.fields(serving)
    settled = await settled_fields(fields, COMPLETIONS, state, asked)
    body = CompletionRequest.model_validate(
        {
            **settled,
            "stream": True,
            "stream_options": {"include_usage": True},
            "request_id": request_id,
        }
    )
    # vLLM's class takes fewer than editors send.
    body.stop = list(request.stops)
    created = await serving.create_completion(body)
    if isinstance(created, ErrorResponse):
        raise HTTPException(created.error.code, created.error.message)
    model = request.model or state.openai_serving_models.model_name()
    return Answer(request_id, model, created)


async def whole(answer: Answer, limit_ms: float | None = None) -> list[Choice]:
    """All choices of an answer; after ``limit_ms`` those that have a line are not
    waited for.
    """
    choices = {0: Choice("", "stop")}
    begin = time.monotonic()
    async with aclosing(answer.parts()) as parts:
        async for part in parts:
            before = choices.get(part.choice, Choice("", "stop"))
            choices[part.choice] = Choice(
                before.text + part.text, part.finish_reason or before.finish_reason
            )
            is_late = limit_ms and (time.monotonic() - begin) * 1000 > limit_ms
            if is_late and all("\n" in choice.text for choice in choices.values()):
                break
    return [choice for _, choice in sorted(choices.items())]
