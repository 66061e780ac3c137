"""``/v1/fim/completions``, as Mistral's and Inception's clients ask and read."""

import json
from typing import Any

from pydantic import Field

from dllm_engine.editors.cursor import (
    Answer,
    Choice,
    CursorRequest,
    Part,
    SamplingFields,
)


class FimBody(SamplingFields):
    """The body of a request. Fields that are not here are ignored."""

    prompt: str
    suffix: str | None = None
    model: str | None = None
    max_tokens: int | None = Field(None, ge=-1)
    stream: bool | None = False
    n: int | None = Field(None, ge=1)
    random_seed: int | None = None

    def request(self) -> CursorRequest:
        sampling = self.sampling
        if self.seed is None:
            sampling["seed"] = self.random_seed
        return CursorRequest(
            self.prompt,
            self.suffix or "",
            budget=self.max_tokens,
            stops=self.stops,
            num_choices=self.n or 1,
            model=self.model,
            sampling=sampling,
        )


class FimForm:
    """Choices have the text of a completion and the message of a chat: each client
    reads one of them.
    """

    media_type = "text/event-stream"
    last = "data: [DONE]\n\n"

    def whole(self, answer: Answer, choices: list[Choice], created: int) -> Any:
        return {
            "id": answer.id,
            "object": "chat.completion",
            "created": created,
            "model": answer.model,
            "choices": [
                {
                    "index": index,
                    "text": choice.text,
                    "message": {"role": "assistant", "content": choice.text},
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": answer.usage,
        }

    def event(self, answer: Answer, part: Part) -> str:
        choice = {
            "index": part.choice,
            "text": part.text,
            "delta": {"role": "assistant", "content": part.text},
            "finish_reason": part.finish_reason,
        }
        chunk = {
            "id": answer.id,
            "object": "chat.completion.chunk",
            "created": part.created,
            "model": answer.model,
            "choices": [choice],
        }
        return f"data: {json.dumps(chunk)}\n\n"

    def end(self, answer: Answer) -> str:
        return self.last

    def error(self, status: int, message: str) -> Any:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {
            "error": {"message": message, "type": kind, "param": None, "code": status}
        }

    def error_event(self, status: int, message: str) -> str:
        return f"data: {json.dumps(self.error(status, message))}\n\n{self.last}"
