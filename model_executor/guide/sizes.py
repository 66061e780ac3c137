"""Config and vocabulary of a guide model, read before it is loaded.

Guides are Qwen2 and Llama models, in the diffusion models' own layers: Qwen2 is Dream's
block, Llama is the same without biases, and their checkpoints name tensors as Dream's
do. ``Guide`` makes attention causal.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from dllm_engine.decoding.page_layout import GuideShape, head_dim_of
from dllm_engine.model_executor.loading.files import check_files
from dllm_engine.model_executor.models.configs import Config

# Keys of config.json that would change the computation, with the values this model
# implements.
_REQUIRED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "rope_type": ("default",),
}
GUIDE_MODEL_TYPES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


@lru_cache
def guide_config(guide: str) -> Any:
    """A guide's config; raises ``ValueError`` where it cannot be loaded, or names a
    model that cannot guide.
    """
    check_files(guide)
    try:
        config = AutoConfig.from_pretrained(guide)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"guide_model={guide!r} cannot be loaded: {' '.join(str(error).split())}"
        ) from None
    if config.model_type not in GUIDE_MODEL_TYPES or isinstance(config, Config):
        raise ValueError(
            f"architectures={config.architectures}, model_type={config.model_type!r} "
            f"cannot guide; guides are {', '.join(GUIDE_MODEL_TYPES.values())}"
        )
    stated = vars(config) | config.rope_parameters
    for key, allowed in _REQUIRED_VALUES.items():
        if (value := stated.get(key, allowed[0])) not in allowed:
            raise ValueError(
                f"guide's config.json: {key}={value!r} is not supported, only "
                f"{allowed[0]!r}"
            )
    head_dim = head_dim_of(config)
    if head_dim * config.num_attention_heads != config.hidden_size:
        raise ValueError(
            f"guide's config.json: head_dim={head_dim} of {config.num_attention_heads} "
            f"heads is not supported with hidden_size={config.hidden_size}; the heads "
            f"must fill it"
        )
    config.include_qkv_bias = (
        config.model_type == "qwen2"
    )  # the key under which a diffusion model's config says so
    return config


def guide_shape(
    guide: str, vocabulary: Mapping[str, int] | None, tokens_per_token: float
) -> GuideShape:
    """Sizes of a guide of a model with this vocabulary. The model's ids are passed on
    as they are if they mean the same to the guide, which knows most of them, or if
    nothing is known of them (None); else the guide takes ``tokens_per_token`` of its
    own for each."""
    config, same_tokens = guide_config(guide), True
    if vocabulary is not None:
        theirs = AutoTokenizer.from_pretrained(guide).get_vocab()
        agrees = all(
            vocabulary.get(token, number) == number for token, number in theirs.items()
        )
        same_tokens = agrees and len(vocabulary.keys() & theirs.keys()) >= 0.9 * len(
            vocabulary
        )
    return GuideShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim_of(config),
        same_tokens=same_tokens,
        tokens_per_token=1.0 if same_tokens else tokens_per_token,
    )
