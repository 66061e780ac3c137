"""Defaults of requests: ``generation_config.json`` of a checkpoint, and vLLM's ``override_generation_config``.

A user's setting that is not supported is refused. What a file brings, which its author wrote for another engine, is
left out with a warning.
"""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from dllm_engine.admission import unsupported
from dllm_engine.options import explain
from dllm_engine.text import did_you_mean

if TYPE_CHECKING:
    from vllm.config import ModelConfig


_NAME = "generation_config.json"


class _Content(BaseModel):
    model_config = ConfigDict(strict=True)

    eos_token_id: NonNegativeInt | list[NonNegativeInt] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    max_new_tokens: int | None = Field(None, ge=1)


USED = ("temperature", "top_p", "top_k", "max_new_tokens")
"""Defaults that are served."""
UNSUPPORTED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p")
"""The other defaults that vLLM takes from there."""
_CHANGE_LENGTH = ("expand_token_id", "delete_token_id", "split_token_id")
"""Tokens of models that change the length of a response while they decode."""


def checkpoint_generation(model_config: "ModelConfig") -> dict[str, Any]:
    """Supported defaults that the checkpoint, or the folder named as ``generation_config``, states.

    Raises ``ValueError`` naming the file, if it cannot be read or holds a wrong value.
    """
    stated = _stated(model_config)
    # "vllm" means that no default comes from the file. vLLM takes end tokens from it nevertheless.
    names = () if model_config.generation_config == "vllm" else USED
    return {name: stated[name] for name in names if stated.get(name) is not None}


def left_out_generation(model_config: "ModelConfig") -> str | None:
    """A sentence that names what the checkpoint states and the engine leaves out; None if there is nothing."""
    stated = {} if model_config.generation_config == "vllm" else _stated(model_config)
    shown = [f"{name}={stated[name]!r}" for name in UNSUPPORTED if unsupported(name, stated.get(name)) is not None]
    if not shown:
        return None
    return f"{_folder(model_config)}/{_NAME}: not supported for diffusion models, and left out: {', '.join(shown)}"


def settled_override(given: dict[str, Any]) -> dict[str, Any]:
    """``override_generation_config`` without values that mean nothing. Raises ``ValueError`` naming what is wrong."""
    where = "override_generation_config"
    for name, value in given.items():
        if name not in (*USED, *UNSUPPORTED):
            raise ValueError(f"{where} takes no {name!r}{did_you_mean(name, USED)} (it may hold {', '.join(USED)})")
        if reason := unsupported(name, value):
            raise ValueError(f"{where}: {reason}; leave it out")
    _check(given, where)
    return {name: value for name, value in given.items() if name in USED and value is not None}


def _stated(model_config: "ModelConfig") -> dict[str, Any]:
    """The content of the file; raises ``ValueError`` naming it."""
    folder = _folder(model_config)
    file = f"{folder}/{_NAME}"
    try:
        content = get_hf_file_to_dict(_NAME, folder, model_config.revision)
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(f'{file} holds a {type(content).__name__}, not an object such as {{"temperature": 0.7}}')
    _check(content, file)
    for name in _CHANGE_LENGTH:
        if content.get(name) is not None:
            raise ValueError(
                f"{file}: {name}={content[name]!r}: models that expand or delete tokens while they decode are not "
                f"supported"
            )
    try:
        model_config.try_get_generation_config()  # as vLLM does for every engine
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None
    return content


def _folder(model_config: "ModelConfig") -> str:
    source = model_config.generation_config  # "auto" (the checkpoint's own), "vllm" (none), or a folder
    return model_config.hf_config_path or model_config.model if source in ("auto", "vllm") else source


def _check(values: dict[str, Any], where: str) -> None:
    try:
        _Content.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{where}: {explain(error, '')}") from None
