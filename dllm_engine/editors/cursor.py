"""A request for a completion at a cursor, from any route of editors, and its answer."""

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

from dllm_engine.editors.completions import CUT_HEADER, around_cursor
from dllm_engine.editors.markers import file_text
from dllm_engine.vllm_hooks.server.open_requests import open_request
from dllm_engine.vllm_hooks.server.settling import COMPLETIONS, settled_fields


@dataclass(frozen=True)
class CursorRequest:
    """A request for a completion at a cursor."""

    prefix: str
    suffix: str | None = ""
    """None: the prefix may be a prompt with markers."""
    context: Sequence[tuple[str, str]] = ()
    """Other files, by path."""
    budget: int | None = None
    """Limit on the tokens."""
    stops: Sequence[str] = ()
    num_choices: int = 1
    model: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of ``/v1/completions``."""
    limit_ms: float | None = None

    def fields(self, serving: Any) -> dict[str, Any]:
        """The body of ``/v1/completions`` for this request."""
        prefix, suffix = self.prefix, self.suffix
        if suffix is None:
            prefix, suffix = around_cursor(prefix, serving)
        files = "".join(file_text(path, text) for path, text in self.context)
        chosen = {name: x for name, x in self.sampling.items() if x is not None}
        return {
            **chosen,
            "prompt": files + prefix,
            "suffix": suffix,
            "max_tokens": self.budget,
            "n": self.num_choices,
            "model": self.model,
        }


class SamplingFields(BaseModel):
    """Fields of bodies for sampling and stop strings. Undeclared fields are ignored."""

    model: str | None = None
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
        """Fields of ``/v1/completions``. A seed below 0 means no seed. Tabby's seeds have
        64 bits.
        """
        fields = self.model_dump(include={"temperature", "top_p", "top_k"})
        seed = None if self.seed is None or self.seed < 0 else self.seed % 2**63
        return fields | {"seed": seed}

    def between(self, prefix: str, suffix: str | None, **fields: Any) -> CursorRequest:
        """The request for a completion between two texts."""
        common = {"stops": self.stops, "model": self.model, "sampling": self.sampling}
        return CursorRequest(prefix, suffix, **common | fields)


class Part(NamedTuple):
    """A part of one choice of an answer."""

    choice: int
    text: str
    finish_reason: str | None
    num_tokens: int
    """Number of tokens of the choice up to and with this part."""


@dataclass
class Choice:
    """One choice of an answer, as far as it has come."""

    text: str = ""
    finish_reason: str = "stop"
    num_tokens: int = 0


@dataclass
class Answer:
    """An answer, and the parts that are still to come."""

    id: str
    model: str
    coming: AsyncGenerator[Part, None]
    num_prompt_tokens: int = 0
    limit_ms: float | None = None
    """Time after which a choice with at least a line is complete, in milliseconds."""
    is_cut: bool = False
    """True if the texts around the cursor did not fit."""
    created: int = field(default_factory=lambda: int(time.time()))
    begin: float = field(default_factory=time.monotonic)
    choices: dict[int, Choice] = field(default_factory=lambda: {0: Choice()})

    @property
    def usage(self) -> dict[str, int]:
        num_tokens = sum(choice.num_tokens for choice in self.choices.values())
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt_tokens + num_tokens,
        }

    async def parts(self) -> AsyncGenerator[Part, None]:
        """Parts as they come. They are then in ``choices`` too. Raises
        ``HTTPException`` if an error ends the answer.
        """
        async with aclosing(self.coming) as coming:
            async for part in coming:
                choice = self.choices.setdefault(part.choice, Choice())
                choice.text += part.text
                choice.finish_reason = part.finish_reason or choice.finish_reason
                choice.num_tokens = part.num_tokens
                yield part
                if self._is_late():
                    return

    def _is_late(self) -> bool:
        passed_ms = (time.monotonic() - self.begin) * 1000
        return (
            self.limit_ms is not None
            and passed_ms > self.limit_ms
            and all("\n" in choice.text for choice in self.choices.values())
        )

    async def complete(self) -> None:
        """Wait for all parts."""
        async with aclosing(self.parts()) as parts:
            async for _ in parts:
                pass


async def known(text: str) -> AsyncGenerator[Part, None]:
    """The parts of an answer that needs no model."""
    yield Part(0, text, "stop", 0)


async def _coming(events: AsyncGenerator[str, None]) -> AsyncGenerator[Part, None]:
    """The parts in the stream of ``/v1/completions``."""
    async with aclosing(events):
        async for event in events:
            data = event.removeprefix("data: ").strip()
            if not data.startswith("{"):
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                error = chunk["error"]
                raise HTTPException(int(error["code"]), error["message"])
            # An empty choice has no usage.
            num_tokens = chunk.get("usage", {}).get("completion_tokens", 0)
            for choice in chunk["choices"]:
                yield Part(
                    choice["index"],
                    choice["text"],
                    choice.get("finish_reason"),
                    num_tokens,
                )


async def ask(request: CursorRequest, state: Any, request_id: str) -> Answer:
    """The answer to a request. ``state`` is the state of vLLM's application. Raises
    ``HTTPException`` or ``InvalidRequestError`` for a request that cannot be served.
    """
    serving, current_request = state.openai_serving_completion, open_request.get()
    assert current_request is not None, "Answers is in front"
    fields = request.fields(serving)
    current_request.stops = list(request.stops)
    settled = await settled_fields(fields, COMPLETIONS, state, current_request)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = CompletionRequest.model_validate(
        settled | {"stream": True, "stream_options": usage, "request_id": request_id}
    )
    # vLLM's class has a lower limit than editors send.
    body.stop = current_request.stops
    events = await serving.create_completion(body)
    if isinstance(events, ErrorResponse):
        raise HTTPException(events.error.code, events.error.message)
    model = request.model or state.openai_serving_models.model_name()
    return Answer(
        request_id,
        model,
        _coming(events),
        num_prompt_tokens=len(settled["prompt"][0]),
        limit_ms=request.limit_ms,
        is_cut=CUT_HEADER in current_request.headers,
    )
