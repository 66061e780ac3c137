"""Config and vocabulary of a guide model, read before it is loaded.

Guides are Qwen2 and Llama models. They use the layers of diffusion models: Qwen2's
block, or for Llama the same block without biases, under transformers' names of tensors.
``Guide`` makes attention causal.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from transformers import AutoTokenizer

from dllm_engine.decoding.page_layout import GuideShape, head_dim_of
from dllm_engine.families import ModelFamily
from dllm_engine.model_executor.loading.files import check_files
from dllm_engine.model_executor.loading.tokenizers import tokenizer_files_named
from dllm_engine.model_executor.models.config_facts import stated_config
from dllm_engine.model_executor.models.config_keys import keys_of
from dllm_engine.model_executor.models.configs import (
    Config,
    config_class_for,
)
from dllm_engine.text import shortened

_QWEN2 = ModelFamily(
    name="Qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    checkpoints=(),
    qkv_bias=True,
    defaults={"rope_theta": 10_000.0},
    fixed={
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "quantization_config": (None,),
    },
    without_effect=("sliding_window", "max_window_layers", "pretraining_tp"),
)
_LLAMA = replace(
    _QWEN2,
    name="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    qkv_bias=False,
)
_GUIDES: dict[object, type[Config]] = {
    family.model_type: config_class_for(family, keys_of(family))
    for family in (_QWEN2, _LLAMA)
}
"""Configs of models that can guide, by ``model_type``."""


@lru_cache
def guide_config(guide: str) -> Config:
    """Config of a guide. Raises ``ValueError`` if it cannot be loaded, or is of a model
    that cannot guide.
    """
    check_files(guide)
    try:
        stated = stated_config(guide, {})
    except ValueError as error:
        raise ValueError(f"guide_model={guide!r} cannot be loaded: {error}") from None
    model_type = stated.pop("model_type", None)
    config_class = _GUIDES.get(model_type) if isinstance(model_type, str) else None
    listed = stated.get("architectures")
    if config_class is None or (
        isinstance(listed, list)
        and config_class.schema.family.architecture not in listed
    ):
        guides = ", ".join(
            config.schema.family.architecture for config in _GUIDES.values()
        )
        raise ValueError(
            f"{guide}/config.json: architectures={shortened(listed)}, "
            f"model_type={shortened(model_type)} cannot guide; guides are {guides}"
        )
    config = config_class(**stated | {"name_or_path": guide})
    if (kind := config.rope_parameters["rope_type"]) != "default":
        raise ValueError(
            f"{guide}/config.json: rope_type={kind!r} of a guide is not supported, only "
            f"'default'"
        )
    return config


def guide_shape(
    guide: str, vocabulary: Mapping[str, int] | None, tokens_per_token: float
) -> GuideShape:
    """Sizes of a guide for a model with this vocabulary. The guide reads the model's
    token ids if most of them mean the same to both, or if the vocabulary is unknown
    (None). Else it reads ``tokens_per_token`` of its own tokens for each."""
    config = guide_config(guide)
    same_tokens = True
    if vocabulary is not None:
        with tokenizer_files_named(guide):
            guide_vocabulary = AutoTokenizer.from_pretrained(guide).get_vocab()
        agrees = all(
            vocabulary.get(token, number) == number
            for token, number in guide_vocabulary.items()
        )
        same_tokens = agrees and len(
            vocabulary.keys() & guide_vocabulary.keys()
        ) >= 0.9 * len(vocabulary)
    return GuideShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim_of(config),
        same_tokens=same_tokens,
        tokens_per_token=1.0 if same_tokens else tokens_per_token,
    )
