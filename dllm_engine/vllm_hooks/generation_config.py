"""Defaults of requests: ``generation_config.json`` of a checkpoint, and vLLM's ``override_generation_config``.

A user's setting that is not supported is refused. What a file brings, which its author wrote for another engine, is
left out with a warning.
"""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from dllm_engine.admission import unsupported
from dllm_engine.options import explain, shortened
from dllm_engine.text import did_you_mean

if TYPE_CHECKING:
    from vllm.config import ModelConfig


_NAME = "generation_config.json"


class _Defaults(BaseModel):
    model_config = ConfigDict(strict=True)

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    max_new_tokens: int | None = Field(None, ge=1)


class _File(_Defaults):
    eos_token_id: NonNegativeInt | list[NonNegativeInt] | None = None


UNSUPPORTED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p")
"""The other defaults that vLLM takes from there."""
_CHANGE_LENGTH = ("expand_token_id", "delete_token_id", "split_token_id")
"""Tokens of models that change the length of a response while they decode."""
_WITHOUT_EFFECT = ("do_sample", "max_length", "transformers_version", "use_cache")
"""Keys of files that say nothing about a response of ``max_new_tokens`` at ``temperature``."""
_OFF_AT_ONE = (
    "encoder_repetition_penalty",
    "guidance_scale",
    "length_penalty",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "typical_p",
)


def checkpoint_generation(model_config: "ModelConfig") -> dict[str, Any]:
    """Supported defaults that the checkpoint, or the folder named as ``generation_config``, states.

    Raises ``ValueError`` naming the file, if it cannot be read or holds a wrong value.
    """
    stated = _stated(model_config)
    # "vllm" means that no default comes from the file. vLLM takes end tokens from it nevertheless.
    ignored = model_config.generation_config == "vllm"
    names = () if ignored else _Defaults.model_fields
    return {name: stated[name] for name in names if stated.get(name) is not None}


def left_out_generation(model_config: "ModelConfig") -> str | None:
    """A sentence that names what the checkpoint states and the engine leaves out; None if there is nothing."""
    if model_config.generation_config == "vllm":
        return None
    shown = [f"{name}={shortened(value)}" for name, value in _stated(model_config).items() if _is_left_out(name, value)]
    if not shown:
        return None
    return f"{_folder(model_config)}/{_NAME}: not supported for diffusion models, and left out: {', '.join(shown)}"


def settled_override(given: dict[str, Any]) -> dict[str, Any]:
    """``override_generation_config`` without values that mean nothing. Raises ``ValueError`` naming what is wrong."""
    where, allowed = "override_generation_config", list(_Defaults.model_fields)
    for name, value in given.items():
        if name not in (*allowed, *UNSUPPORTED):
            raise ValueError(
                f"{where} takes no {name!r}{did_you_mean(name, allowed)} (it may hold {', '.join(allowed)})"
            )
        if reason := unsupported(name, value):
            raise ValueError(f"{where}: {reason}; leave it out")
    _check(_Defaults, given, where)
    return {name: value for name, value in given.items() if name in allowed and value is not None}


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
    _check(_File, content, file)
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


def _is_left_out(name: str, value: Any) -> bool:
    if name in UNSUPPORTED:
        return unsupported(name, value) is not None
    is_known = name in _Defaults.model_fields or name in _WITHOUT_EFFECT or name.startswith(("_", "output_", "return_"))
    is_token = name.endswith("_token_id") and not name.startswith("forced_")
    return not (is_known or is_token) and bool(value) and (value != 1 or name not in _OFF_AT_ONE)


def _check(kind: type[BaseModel], values: dict[str, Any], where: str) -> None:
    try:
        kind.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{where}: {explain(error, '')}") from None
