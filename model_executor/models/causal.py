"""Autoregressive models that check a diffusion model's drafts: Qwen2 and Llama, in the diffusion models' own layers.

Qwen2 is Dream's block, and Llama is the same without biases; their checkpoints name tensors as Dream's do. Attention is
causal, which is the layer pass's business (``model_executor/guide/model.py``).
"""

from typing import Any

from dllm_engine.model_executor.models.configs import Config
from dllm_engine.scheduler.page_layout import head_dim_of

# Keys of config.json that would change the computation, with the values this model implements.
_REQUIRED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
}
GUIDE_MODEL_TYPES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


def check_guide(config: Any) -> None:
    """Raise ``ValueError`` for a config that is none of a guide's, or a variant that is not implemented."""
    if config.model_type not in GUIDE_MODEL_TYPES or isinstance(config, Config):
        raise ValueError(
            f"architectures={config.architectures}, model_type={config.model_type!r} cannot guide; guides are "
            f"{', '.join(GUIDE_MODEL_TYPES.values())}"
        )
    for key, allowed in _REQUIRED_VALUES.items():
        if (value := getattr(config, key, allowed[0])) not in allowed:
            raise ValueError(f"guide's config.json: {key}={value!r} is not supported, only {allowed[0]!r}")
    if (rope_type := config.rope_parameters["rope_type"]) != "default":
        raise ValueError(f"guide's config.json: rope_type={rope_type!r} is not supported, only 'default'")
    head_dim = head_dim_of(config)
    if head_dim * config.num_attention_heads != config.hidden_size:
        raise ValueError(
            f"guide's config.json: head_dim={head_dim} of {config.num_attention_heads} heads is not supported with "
            f"hidden_size={config.hidden_size}; the heads must fill it"
        )
