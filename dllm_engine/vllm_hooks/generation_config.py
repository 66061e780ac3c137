"""Defaults of requests: ``generation_config.json`` of a checkpoint, and vLLM's ``override_generation_config``.

A user's setting that is not supported is refused. What a file brings, which its author wrote for another engine, is
left out with a warning.
"""

from typing import TYPE_CHECKING, Any

from dllm_engine.admission import unsupported
from dllm_engine.text import did_you_mean

if TYPE_CHECKING:
    from vllm.config import ModelConfig

USED = ("temperature", "top_p", "top_k", "max_new_tokens")
"""Defaults that are served."""
UNSUPPORTED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p")
"""The other defaults that vLLM takes from there."""


def checkpoint_generation(model_config: "ModelConfig") -> dict[str, Any]:
    """Supported defaults that the checkpoint, or the folder named as ``generation_config``, states; None for others,
    which takes them out of what vLLM reads there."""
    stated = {name: value for name, value in _stated(model_config).items() if name in USED and value is not None}
    return dict.fromkeys(UNSUPPORTED) | stated


def left_out_generation(model_config: "ModelConfig") -> str | None:
    """A sentence that names what the checkpoint states and the engine leaves out; None if there is nothing."""
    stated = _stated(model_config)
    shown = [f"{name}={stated[name]!r}" for name in UNSUPPORTED if unsupported(name, stated.get(name)) is not None]
    if not shown:
        return None
    source = f"generation_config.json of {model_config.model}"
    return f"{source}: not supported for diffusion models, and left out: {', '.join(shown)}"


def settled_override(given: dict[str, Any]) -> dict[str, Any]:
    """``override_generation_config`` without values that mean nothing. Raises ``ValueError`` naming what is wrong."""
    where = "override_generation_config"
    for name, value in given.items():
        if name not in (*USED, *UNSUPPORTED):
            raise ValueError(f"{where} takes no {name!r}{did_you_mean(name, USED)} (it may hold {', '.join(USED)})")
        if reason := unsupported(name, value):
            raise ValueError(f"{where}: {reason}; leave it out")
    return {name: value for name, value in given.items() if name in USED and value is not None}


def _stated(model_config: "ModelConfig") -> dict[str, Any]:
    """The file's content; "vllm" means that no default comes from it."""
    return {} if model_config.generation_config == "vllm" else model_config.try_get_generation_config()
