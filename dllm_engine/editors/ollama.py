"""``/api/generate`` and what Ollama's clients ask before it. There is no chat."""

import json
import time
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, Field

from dllm_engine.editors.cursor import (
    Answer,
    Choice,
    CursorRequest,
    Part,
    SamplingFields,
)

VERSION = "0.6.4"
"""The one whose routes these are; some clients ask for at least this one."""


class OllamaOptions(SamplingFields):
    """``options`` of a body."""

    num_predict: int | None = Field(default=None, ge=-2)


class GenerateBody(BaseModel):
    """The body of ``/api/generate``. Fields that are not here are ignored."""

    model: str
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = False
    stream: bool | None = True
    options: OllamaOptions | None = None

    def request(self) -> CursorRequest | str:
        """``raw`` prompts have markers, if they are for a cursor. Without a prompt, the
        model is to be loaded, which it is.
        """
        if not self.prompt:
            return ""
        chosen = self.options or OllamaOptions()
        budget = chosen.num_predict
        return CursorRequest(
            self.prompt,
            None if self.raw or self.suffix is None else self.suffix,
            budget=None if budget is None or budget < 1 else budget,
            stops=chosen.stops,
            model=model_name(self.model),
            sampling=chosen.sampling,
        )


class ShowBody(BaseModel):
    """The body of ``/api/show``."""

    model: str | None = None
    name: str | None = None


class OllamaForm:
    """Lines of JSON."""

    media_type = "application/x-ndjson"

    def __init__(self, body: GenerateBody | None) -> None:
        """``body``: of the request; None where it cannot be read."""
        self._begin = time.monotonic_ns()
        self._loads = body is not None and not body.prompt
        self._reason = "stop"

    def whole(self, answer: Answer, choices: list[Choice], created: int) -> Any:
        self._reason = choices[0].finish_reason
        return self._final(answer, choices[0].text)

    def _final(self, answer: Answer, text: str) -> dict[str, Any]:
        duration = time.monotonic_ns() - self._begin
        return {
            "model": answer.model,
            "created_at": _now(),
            "response": text,
            "done": True,
            "done_reason": "load" if self._loads else self._reason,
            "context": [],
            "total_duration": duration,
            "load_duration": 0,
            "prompt_eval_count": answer.usage.get("prompt_tokens", 0),
            "prompt_eval_duration": 0,
            "eval_count": answer.usage.get("completion_tokens", 0),
            "eval_duration": duration,
        }

    def event(self, answer: Answer, part: Part) -> str:
        self._reason = part.finish_reason or self._reason
        return _line(
            {
                "model": answer.model,
                "created_at": _now(),
                "response": part.text,
                "done": False,
            }
        )

    def end(self, answer: Answer) -> str:
        return _line(self._final(answer, ""))

    def error(self, status: int, message: str) -> Any:
        return {"error": message}

    def error_event(self, status: int, message: str) -> str:
        return _line(self.error(status, message))


def model_name(name: str) -> str:
    """The name of a model without the tag that clients add."""
    return name.removesuffix(":latest")


def version() -> dict[str, Any]:
    """The answer of ``/api/version``."""
    return {"version": VERSION}


def tags(models: list[str], family: str) -> dict[str, Any]:
    """The answer of ``/api/tags``."""
    listed = [
        {
            "name": name,
            "model": name,
            "modified_at": _now(),
            "size": 0,
            "digest": "",
            "details": _details(family),
        }
        for name in models
    ]
    return {"models": listed}


def shown(family: str, context_length: int, *, fills_in: bool) -> dict[str, Any]:
    """The answer of ``/api/show``. ``fills_in``: what clients look for in template and
    capabilities.
    """
    suffix = "{{ .Suffix }}" if fills_in else ""
    capabilities = ["completion", *(["insert"] if fills_in else [])]
    return {
        "modelfile": "",
        "parameters": "",
        "template": f"{{{{ .Prompt }}}}{suffix}",
        "details": _details(family),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": context_length,
        },
        "capabilities": capabilities,
    }


def _details(family: str) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _line(body: dict[str, Any]) -> str:
    return f"{json.dumps(body)}\n"
