"""What is checked before vLLM starts an engine, so that a mistake ends in one sentence and not in vLLM's traceback."""

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dllm_engine.demo import model_path
from dllm_engine.options import did_you_mean

CONFIG_ARGUMENTS = ("hf_config_path", "hf_overrides", "revision", "hf_token")
"""Arguments of vLLM that decide which config a model has."""


def check_argument_names(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``ValueError`` for the first keyword argument that is not ``known``, with the closest that is."""
    known = list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"unknown argument {name!r}{did_you_mean(name, known)}")


def check_start(model: str, arguments: Mapping[str, Any]) -> None:
    """Check that ``model`` is one of ours and that what the engine needs is installed.

    Args:
        model: a checkpoint's folder or Hugging Face name, or ``"demo"``.
        arguments: those of ``vllm.LLM`` that the caller gave.

    Raises:
        ValueError: naming the folder, the file and its key, or the extra to install.
    """
    backends = {name: arguments.get(name) for name in ("distributed_executor_backend", "data_parallel_backend")}
    for name, backend in backends.items():
        if backend == "ray" and find_spec("ray") is None:
            raise ValueError(f"{name}='ray': Ray is not installed; run pip install 'dllm-engine[ray]'")
    check_folder(model)
    overrides = arguments.get("hf_overrides") or {}
    if "://" in model or not isinstance(overrides, dict) or os.environ.get("VLLM_USE_MODELSCOPE", "0") not in ("", "0"):
        return  # checked by engine_config, once vLLM has made the config
    # Imports transformers, for seconds.
    from dllm_engine.model_executor.models.configs import parse_config

    source = arguments.get("hf_config_path") or model_path(model)
    parse_config(_stated_config(source, arguments) | overrides, source)


def check_folder(model: str) -> None:
    """Raise ``ValueError`` where ``model`` names a folder that does not exist."""
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        raise ValueError(f"model folder {model} does not exist")


def _stated_config(model: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the config.json of ``model`` states: of its folder, or of Hugging Face, downloaded as vLLM would."""
    from transformers import PretrainedConfig

    from dllm_engine.model_executor.models.configs import read_json_object

    if Path(model).is_dir():
        return read_json_object(Path(model) / "config.json")
    try:
        config: dict[str, Any] = PretrainedConfig.get_config_dict(
            model, revision=arguments.get("revision"), token=arguments.get("hf_token")
        )[0]
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model {model!r} is no folder, and cannot be had from Hugging Face: {reason}") from None
    return config
