"""The config that a model's checkpoint states, and what is checked of a model before
vLLM starts an engine.

A mistake then ends in one sentence and not in vLLM's traceback.
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

SHAPES = {
    name: (family, shape)
    for family in FAMILIES.values()
    for name, shape in family.shapes.items()
}
"""By name: the family, and the shape. A model of the name has these sizes and random
weights, and measures as a real one does."""


def _released(family: ModelFamily, shape: Shape) -> dict[str, Any]:
    """Config of a released checkpoint: the defaults of its family's keys, with those of
    its shape.
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
    """True for the name of a shape, or of one scaled down such as ``llada-8b/4``."""
    return model.partition("/")[0] in SHAPES


def named_shape(name: str) -> dict[str, Any]:
    """The config of a named shape; raises ``ValueError`` if it is unknown, or its heads
    cannot be divided so. In ``llada-8b/4`` heads keep their size, and experts become
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
    # The last tokens of the vocabulary, so that prompts can be drawn from all others.
    config["mask_token_id"], config["eos_token_id"] = (
        config["vocab_size"] - 1,
        config["vocab_size"] - 2,
    )
    return config


def load_config(model: str) -> PlainConfig:
    """A model's config: of its folder, a named shape, known by its name, or of Hugging
    Face, which is asked for config.json alone. Raises ``ValueError`` naming the model,
    or the key that is not supported."""
    if is_named_shape(model):
        return PlainConfig(named_shape(model), model)
    if model in RELEASED_CONFIGS:
        return PlainConfig(RELEASED_CONFIGS[model], model)
    check_folder(model)
    source = model_path(model)
    return PlainConfig(stated_config(source, {}), source)


def check_start(model: str, arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` naming a folder, or a file and its key, if ``model`` is none
    of ours; ``arguments``: those of ``vllm.LLM`` that the caller gave."""
    check_folder(model)
    overrides = arguments.get("hf_overrides") or {}
    if (
        "://" in model
        or not isinstance(overrides, dict)
        or os.environ.get("VLLM_USE_MODELSCOPE", "0") not in ("", "0")
    ):
        return  # checked by engine_config, once vLLM has made the config
    # Imports transformers, which takes seconds.
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
    """Raise ``ValueError`` if ``model`` names a folder that does not exist, or whose
    files are not what they seem.
    """
    check_files(model)
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        raise ValueError(
            f"model folder {model} does not exist; name one that does, or a model of "
            f"Hugging Face (`dllm models` lists them)"
        )
