"""The routes ``/infill`` and ``/completion`` for clients of llama.cpp's server."""

from typing import Any

from pydantic import AliasChoices, BaseModel, Field

from dllm_engine.editors.cursor import (
    Answer,
    CursorRequest,
    Part,
    SamplingFields,
)
from dllm_engine.editors.forms import Form

_STOP_TYPES = {"length": "limit", "stop": "eos"}


class ExtraFile(BaseModel):
    """A part of another file."""

    text: str = ""
    filename: str = ""


class LlamaBody(SamplingFields):
    """The fields of both routes. Other fields are ignored, and so is the model's name:
    clients send a name that llama.cpp does not read.
    """

    n_predict: int | None = Field(
        None, ge=-1, validation_alias=AliasChoices("n_predict", "max_tokens")
    )
    stream: bool | None = False
    n_cmpl: int | None = Field(None, ge=1)
    t_max_predict_ms: float | None = None
    response_fields: list[str] | None = None

    def between(self, prefix: str, suffix: str | None, **more: Any) -> CursorRequest:
        return super().between(
            prefix,
            suffix,
            budget=self.n_predict,
            num_choices=self.n_cmpl or 1,
            limit_ms=self.t_max_predict_ms,
            model=None,
            **more,
        )


class InfillBody(LlamaBody):
    """The body of ``/infill``."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = None
    """The begin of the cursor's line. It is not in ``input_prefix``."""

    def request(self) -> CursorRequest | str:
        if self.n_predict == 0:  # to have the texts read, which nothing is kept of
            return ""
        return self.between(
            self.input_prefix + (self.prompt or ""),
            self.input_suffix,
            context=[(each.filename, each.text) for each in self.input_extra or ()],
        )


class CompletionBody(LlamaBody):
    """The body of ``/completion``. The prompt may have markers."""

    prompt: str

    def request(self) -> CursorRequest:
        return self.between(self.prompt, None)


class LlamaForm(Form):
    """llama.cpp's answers."""

    def whole(self, answer: Answer) -> Any:
        bodies = [
            self._kept(self._final(answer, index)) for index in sorted(answer.choices)
        ]
        return bodies if (self.body.n_cmpl or 1) > 1 else bodies[0]

    def part(self, answer: Answer, part: Part) -> dict[str, Any]:
        return {"index": part.choice, "content": part.text, "stop": False}

    def final(self, answer: Answer) -> dict[str, Any]:
        return self._final(answer, 0) | {"content": ""}

    def _final(self, answer: Answer, index: int) -> dict[str, Any]:
        choice = answer.choices[index]
        return {
            "index": index,
            "content": choice.text,
            "id_slot": 0,
            "stop": True,
            "model": answer.model,
            "tokens_predicted": choice.num_tokens,
            "tokens_evaluated": answer.num_prompt_tokens,
            "tokens_cached": 0,
            "truncated": answer.is_cut,
            "stop_type": _STOP_TYPES.get(choice.finish_reason, "none"),
            "stopping_word": "",
            "has_new_line": "\n" in choice.text,
            "generation_settings": {},
            "timings": {},
        }

    def _kept(self, body: dict[str, Any]) -> dict[str, Any]:
        """The response fields that the request names. ``a/b`` is field b of a."""
        wanted = self.body.response_fields
        if wanted is None:
            return body
        kept = {}
        for name in filter(None, wanted):
            value: Any = body
            for key in name.split("/"):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                kept[name] = value
        return kept


def props(config: Any, names: list[str]) -> dict[str, Any]:
    """The answer of ``/props``."""
    return {
        "default_generation_settings": {"n_ctx": config.max_model_len, "params": {}},
        "total_slots": 1,
        "model_alias": names[0],
        "model_path": names[0],
        "chat_template": "",
        "modalities": {"vision": False, "audio": False},
        "build_info": "dllm-engine",
    }
