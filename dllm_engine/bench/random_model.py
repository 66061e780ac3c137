"""Engines with random weights of a given shape: values do not change the time."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_engine.checkpoints import RELEASED_CONFIGS, load_config

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.model_executor.models.configs import Config

NAMED_SHAPES: dict[str, str] = {
    "llada-8b": "GSAI-ML/LLaDA-8B-Base",
    "llada-moe-7b": "inclusionAI/LLaDA-MoE-7B-A1B-Base",
    "dream-7b": "Dream-org/Dream-v0-Base-7B",
    "sdar-8b": "JetLM/SDAR-8B-Chat",
    "sdar-8b-b32": "JetLM/SDAR-8B-Chat-b32",
    "sdar-30b": "JetLM/SDAR-30B-A3B-Chat",
    "llada2-mini": "inclusionAI/LLaDA2.0-mini",
}
_SCALED = (
    *("d_model", "n_heads", "n_kv_heads", "n_layers", "mlp_hidden_size", "vocab_size", "embedding_size"),
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size"),
    *("expert_intermediate_size", "moe_intermediate_size"),
)


def is_named_shape(model: str) -> bool:
    """Whether ``model`` means random weights: a name in ``NAMED_SHAPES``, or one scaled down such as ``llada-8b/4``."""
    return model.partition("/")[0] in NAMED_SHAPES


def named_shape(name: str) -> dict[str, Any]:
    """The config of a named shape.

    ``llada-8b/4`` has a quarter of the width, the heads (of unchanged size), the layers, the MLP and the vocabulary.
    Experts become smaller, not fewer.

    Raises:
        ValueError: the name is unknown, or the heads cannot be divided so.
    """
    base, slash, divisor = name.partition("/")
    if base not in NAMED_SHAPES:
        raise ValueError(f"model shape {name!r} is unknown; choose one of {', '.join(NAMED_SHAPES)}, or one with /N")
    config = dict(RELEASED_CONFIGS[NAMED_SHAPES[base]])
    heads = config["n_heads" if "n_heads" in config else "num_attention_heads"]
    allowed = [n for n in range(1, heads + 1) if heads % n == 0]
    if slash and (not divisor.isdecimal() or int(divisor) not in allowed):
        raise ValueError(
            f"model shape {name!r}: the {heads} heads of {base} are divided by one of {', '.join(map(str, allowed))}"
        )
    for key in config.keys() & _SCALED:
        config[key] = max(1, config[key] // int(divisor or 1))
    config["mask_token_id"], config["eos_token_id"] = config["vocab_size"] - 1, config["vocab_size"] - 2
    return config


def config_of(model: str) -> "Config":
    """The config of a named shape, or of a checkpoint by its folder or Hugging Face name.

    Raises ``ValueError`` as ``named_shape`` and ``load_config`` do.
    """
    from dllm_engine.model_executor.models.configs import parse_config

    return parse_config(named_shape(model), model) if is_named_shape(model) else load_config(model)


@contextmanager
def config_folder(config: dict[str, Any]) -> Iterator[Path]:
    """A folder with the config alone, for ``load_format="dummy"``; gone when the engine has been made from it."""
    with tempfile.TemporaryDirectory(prefix="dllm-shape-") as name:
        (Path(name) / "config.json").write_text(json.dumps(config))
        yield Path(name)


def random_engine(config: dict[str, Any], **settings: Any) -> "LLM":
    """An engine of the config's shape with random weights, without tokenizer; ``settings`` are those of ``LLM``."""
    from dllm_engine.llm import LLM

    with config_folder(config) as folder:
        return LLM(model=str(folder), load_format="dummy", skip_tokenizer_init=True, **settings)
