"""The config of a model's checkpoint, and checks of a model before vLLM starts an
engine.

So a mistake ends in one sentence instead of vLLM's traceback.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dllm_engine.demo import model_path
from dllm_engine.families import FAMILIES, ModelFamily, Shape
from dllm_engine.model_executor.loading.files import check_files
from dllm_engine.model_executor.models.config_facts import PlainConfig, stated_config
from dllm_engine.model_executor.models.config_keys import SCHEMAS
from dllm_engine.options import EngineOptions
from dllm_engine.text import shortened

SHAPES = {
    name: (family, shape)
    for family in FAMILIES.values()
    for name, shape in family.shapes.items()
}
"""Family and shape by name. A model with this name has these sizes and random weights,
and the same speed as a real one."""


def _released(family: ModelFamily, shape: Shape) -> dict[str, Any]:
    """Config of a released checkpoint: the defaults of its family, with the keys of its
    shape.
    """
    keys = SCHEMAS[family.architecture](torch_dtype="bfloat16", **shape.sizes)
    stated = {"model_type": family.model_type, "architectures": [family.architecture]}
    return keys.model_dump(exclude_none=True) | stated


RELEASED_CONFIGS = {
    checkpoint: _released(family, shape)
    for family, shape in SHAPES.values()
    for checkpoint in shape.checkpoints or family.checkpoints
}
"""Sizes of released checkpoints, for planning before anything is downloaded."""
_SCALED = (
    "d_model",
    "n_heads",
    "n_kv_heads",
    "n_layers",
    "mlp_hidden_size",
    "vocab_size",
    "embedding_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "intermediate_size",
    "expert_intermediate_size",
    "moe_intermediate_size",
)


def is_named_shape(model: str) -> bool:
    """Return True for the name of a shape, or of a scaled-down shape such as
    ``llada-8b/4``.
    """
    return model.partition("/")[0] in SHAPES


def named_shape(name: str) -> dict[str, Any]:
    """The config of a named shape. Raises ``ValueError`` if it is unknown, or if its
    heads cannot be divided. In ``llada-8b/4`` heads keep their size, and experts become
    smaller, not fewer."""
    base, slash, divisor = name.partition("/")
    if base not in SHAPES:
        raise ValueError(
            f"model shape {name!r} is unknown; choose one of {', '.join(SHAPES)}, or "
            f"one with /N"
        )
    config = _released(*SHAPES[base])
    heads = config["n_heads" if "n_heads" in config else "num_attention_heads"]
    allowed = [n for n in range(1, heads + 1) if heads % n == 0]
    if slash and (not divisor.isdecimal() or int(divisor) not in allowed):
        raise ValueError(
            f"model shape {name!r}: the {heads} heads of {base} are divided by one of "
            f"{', '.join(map(str, allowed))}"
        )
    for key in config.keys() & _SCALED:
        config[key] = max(1, config[key] // int(divisor or 1))
    # Special tokens are the last of the vocabulary, so that prompts can be drawn from
    # all others.
    config["mask_token_id"], config["eos_token_id"] = (
        config["vocab_size"] - 1,
        config["vocab_size"] - 2,
    )
    return config


def load_config(model: str) -> PlainConfig:
    """A model's config: from its folder, from a named shape, by the name of a released
    checkpoint, or from Hugging Face, from where only config.json is downloaded. Raises
    ``ValueError`` naming the model, or the key that is not supported."""
    if is_named_shape(model):
        return PlainConfig(named_shape(model), model)
    if model in RELEASED_CONFIGS:
        return PlainConfig(RELEASED_CONFIGS[model], model)
    check_folder(model)
    source = model_path(model)
    return PlainConfig(stated_config(source, {}), source)


def check_start(model: str, arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` naming a folder, or a file and its key, if ``model`` cannot
    be served. ``arguments``: the caller's arguments of ``vllm.LLM``."""
    check_folder(model)
    for name in arguments.keys() & {"speculative_config", "spec_model"}:
        # vLLM looks up its model before the other checks.
        if (value := arguments[name]) is not None:
            raise ValueError(
                f"{name}={shortened(value)} is not supported for diffusion models; "
                f"leave it unset"
            )
    overrides = arguments.get("hf_overrides") or {}
    if (
        "://" in model
        or not isinstance(overrides, dict)
        or os.environ.get("VLLM_USE_MODELSCOPE", "0") not in ("", "0")
    ):
        return  # engine_config checks it once vLLM has made the config
    # Imported here, because transformers takes seconds.
    from dllm_engine.model_executor.models.configs import parse_config

    source = arguments.get("hf_config_path") or model_path(model)
    stated = stated_config(source, arguments)
    if "architectures" in overrides:
        stated["architectures"] = overrides["architectures"]
    parse_config(stated, source).update(overrides)


def check_named_files(options: EngineOptions) -> None:
    """Raise ``ValueError`` naming an option whose file or folder does not exist."""
    for name in ("lora_path", "decision_template", "decision_calibration"):
        path = getattr(options, name)
        if path is not None and not Path(path).exists():
            raise ValueError(f"{name}={path!r} does not exist; check the path")
    if options.guide_model is not None:
        check_folder(options.guide_model)


def check_folder(model: str) -> None:
    """Raise ``ValueError`` if ``model`` is a folder that does not exist, or that has
    damaged files.
    """
    check_files(model)
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        raise ValueError(
            f"model folder {model} does not exist; name one that does, or a model of "
            f"Hugging Face (`dllm models` lists them)"
        )
