"""The route ``/v1/fim/completions`` for clients of Mistral and Inception."""

from typing import Any

from pydantic import AliasChoices, Field

from dllm_engine.editors.cursor import (
    Answer,
    CursorRequest,
    Part,
    SamplingFields,
)
from dllm_engine.editors.forms import Form


class FimBody(SamplingFields):
    """The body of a request. Other fields are ignored."""

    prompt: str
    suffix: str | None = None
    max_tokens: int | None = Field(None, ge=-1)
    stream: bool | None = False
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, validation_alias=AliasChoices("seed", "random_seed"))

    def request(self) -> CursorRequest:
        suffix, num_choices = self.suffix or "", self.n or 1
        return self.between(
            self.prompt, suffix, budget=self.max_tokens, num_choices=num_choices
        )


class FimForm(Form):
    """Choices have the text of a completion and the message of a chat. Each client
    reads one of them.
    """

    kind = "chat.completion"
    ending = "data: [DONE]\n\n"

    def whole(self, answer: Answer) -> Any:
        choices = [
            {
                "index": index,
                "text": self.content(choice.text),
                "message": _message(self.content(choice.text)),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in sorted(answer.choices.items())
        ]
        return _body(self.kind, answer, choices) | {"usage": answer.usage}

    def content(self, text: str) -> str:
        """The content of a message, for the text that was filled in."""
        return text

    def part(self, answer: Answer, part: Part) -> dict[str, Any] | None:
        choice = {
            "index": part.choice,
            "text": part.text,
            "delta": _message(part.text),
            "finish_reason": part.finish_reason,
        }
        chunk = _body("chat.completion.chunk", answer, [choice])
        return chunk | {"usage": answer.usage} if part.finish_reason else chunk


def _message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _body(kind: str, answer: Answer, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": kind,
        "created": answer.created,
        "model": answer.model,
        "choices": choices,
    }
