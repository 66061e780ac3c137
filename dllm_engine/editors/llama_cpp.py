"""``/infill`` and ``/completion``, as clients of llama.cpp's server ask and read."""

import json
from typing import Any

from pydantic import BaseModel, Field

from dllm_engine.editors.cursor import (
    Answer,
    Choice,
    CursorRequest,
    Part,
    SamplingFields,
)

_STOP_TYPES = {"length": "limit", "stop": "eos"}


class ExtraFile(BaseModel):
    """A part of another file."""

    text: str = ""
    filename: str = ""


class LlamaBody(SamplingFields):
    """The fields that both routes take. Fields that are not here are ignored."""

    model: str | None = None
    n_predict: int | None = Field(None, ge=-1)
    stream: bool | None = False
    n_cmpl: int | None = Field(None, ge=1)
    t_max_predict_ms: float | None = None
    response_fields: list[str] | None = None

    def _request(self, prefix: str, suffix: str | None, **more: Any) -> CursorRequest:
        return CursorRequest(
            prefix,
            suffix,
            budget=self.n_predict,
            stops=self.stops,
            num_choices=self.n_cmpl or 1,
            model=self.model,
            sampling=self.sampling,
            **more,
        )


class InfillBody(LlamaBody):
    """The body of ``/infill``."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = None
    """The begin of the cursor's line, which is not in ``input_prefix``."""

    def request(self) -> CursorRequest | str:
        if self.n_predict == 0:  # to have the texts read, which nothing is kept of
            return ""
        return self._request(
            self.input_prefix + (self.prompt or ""),
            self.input_suffix,
            context=[(each.filename, each.text) for each in self.input_extra or ()],
        )


class CompletionBody(LlamaBody):
    """The body of ``/completion``, whose prompt may have markers."""

    prompt: str

    def request(self) -> CursorRequest:
        return self._request(self.prompt, None)


class LlamaForm:
    """llama.cpp's answers."""

    media_type = "text/event-stream"

    def __init__(self, body: LlamaBody | None) -> None:
        """``body``: of the request; None where it cannot be read."""
        self._wanted = None if body is None else body.response_fields
        self._is_list = body is not None and (body.n_cmpl or 1) > 1

    def whole(self, answer: Answer, choices: list[Choice], created: int) -> Any:
        bodies = [
            self._final(answer, index, choice.text, choice.finish_reason)
            for index, choice in enumerate(choices)
        ]
        return bodies if self._is_list else bodies[0]

    def _final(
        self, answer: Answer, index: int, text: str, reason: str
    ) -> dict[str, Any]:
        body = {
            "index": index,
            "content": text,
            "id_slot": 0,
            "stop": True,
            "model": answer.model,
            "tokens_predicted": answer.usage.get("completion_tokens", 0),
            "tokens_evaluated": answer.usage.get("prompt_tokens", 0),
            "tokens_cached": 0,
            "truncated": False,
            "stop_type": _STOP_TYPES.get(reason, "none"),
            "stopping_word": "",
            "has_new_line": "\n" in text,
            "generation_settings": {},
            "timings": {},
        }
        if self._wanted is None:
            return body
        kept = {}
        for name in filter(None, self._wanted):
            value: Any = body
            for key in name.split("/"):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                kept[name] = value
        return kept

    def event(self, answer: Answer, part: Part) -> str:
        chunk = {"index": part.choice, "content": part.text, "stop": False}
        return _event(chunk)

    def end(self, answer: Answer) -> str:
        return _event(self._final(answer, 0, "", "stop"))

    def error(self, status: int, message: str) -> Any:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"code": status, "message": message, "type": kind}}

    def error_event(self, status: int, message: str) -> str:
        return _event(self.error(status, message))


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def props(n_ctx: int, model: str) -> dict[str, Any]:
    """The answer of ``/props``."""
    return {
        "default_generation_settings": {"n_ctx": n_ctx, "params": {}},
        "total_slots": 1,
        "model_alias": model,
        "model_path": model,
        "chat_template": "",
        "modalities": {"vision": False, "audio": False},
        "build_info": "dllm-engine",
    }
