"""The route ``/api/generate``, and the routes that Ollama's clients call before it.
There is no chat.
"""

import json
import time
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, Field

from dllm_engine.editors.cursor import (
    Answer,
    CursorRequest,
    Part,
    SamplingFields,
)
from dllm_engine.editors.forms import Form

VERSION = "0.6.4"
"""The version of Ollama with these routes. Some clients need at least this one."""


class OllamaOptions(SamplingFields):
    """``options`` of a body."""

    num_predict: int | None = Field(default=None, ge=-2)


class GenerateBody(BaseModel):
    """The body of ``/api/generate``. Other fields are ignored."""

    model: str
    prompt: str | None = None
    suffix: str | None = None
    raw: bool | None = False
    stream: bool | None = True
    options: OllamaOptions | None = None

    def request(self) -> CursorRequest | str:
        """The request of this body. ``raw`` prompts for a cursor have markers. A body
        without a prompt asks to load the model, which is loaded already.
        """
        if not self.prompt:
            return ""
        chosen = self.options or OllamaOptions()
        budget = chosen.num_predict
        return chosen.between(
            self.prompt,
            None if self.raw else self.suffix,
            budget=None if budget is None or budget < 1 else budget,
            model=model_name(self.model),
        )


class ShowBody(BaseModel):
    """The body of ``/api/show``."""

    model: str | None = None
    name: str | None = None


class OllamaForm(Form):
    """The form of Ollama's answers: lines of JSON."""

    media_type = "application/x-ndjson"

    def whole(self, answer: Answer) -> dict[str, Any]:
        return self.final(answer) | {"response": answer.choices[0].text}

    def part(self, answer: Answer, part: Part) -> dict[str, Any]:
        return {
            "model": answer.model,
            "created_at": _now(),
            "response": part.text,
            "done": False,
        }

    def final(self, answer: Answer) -> dict[str, Any]:
        choice = answer.choices[0]
        duration_ns = int((time.monotonic() - answer.begin) * 1e9)
        return {
            "model": answer.model,
            "created_at": _now(),
            "response": "",
            "done": True,
            "done_reason": choice.finish_reason if self.body.prompt else "load",
            "context": [],
            "total_duration": duration_ns,
            "load_duration": 0,
            "prompt_eval_count": answer.num_prompt_tokens,
            "prompt_eval_duration": 0,
            "eval_count": choice.num_tokens,
            "eval_duration": duration_ns,
        }

    @staticmethod
    def error(status: int, message: str) -> dict[str, Any]:
        return {"error": message}

    @staticmethod
    def event(body: dict[str, Any]) -> str:
        return f"{json.dumps(body)}\n"


def model_name(name: str) -> str:
    """The name of a model without the tag that clients add."""
    return name.removesuffix(":latest")


def version(config: Any, names: list[str]) -> dict[str, Any]:
    """The answer of ``/api/version``."""
    return {"version": VERSION}


def tags(config: Any, names: list[str]) -> dict[str, Any]:
    """The answer of ``/api/tags``."""
    listed = [
        {
            "name": name,
            "model": name,
            "modified_at": _now(),
            "size": 0,
            "digest": "",
            "details": _details(config.hf_config.model_type),
        }
        for name in names
    ]
    return {"models": listed}


def shown(config: Any) -> dict[str, Any]:
    """The answer of ``/api/show``. From template and capabilities, clients read whether
    the model can fill in.
    """
    family = config.hf_config.model_type
    fills_in = config.hf_config.family.attention == "full"
    return {
        "modelfile": "",
        "parameters": "",
        "template": "{{ .Prompt }}{{ .Suffix }}" if fills_in else "{{ .Prompt }}",
        "details": _details(family),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": config.max_model_len,
        },
        "capabilities": ["completion", "insert"] if fills_in else ["completion"],
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
