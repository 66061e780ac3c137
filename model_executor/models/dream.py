"""Dream: Dream-org/Dream-v0-Base-7B, -Instruct-7B, Dream-Coder, DiffuCoder (Qwen2-type blocks; arXiv 2508.15487)."""

import re

from dllm_engine.model_executor.models.configs import DreamConfig, config_file
from dllm_engine.model_executor.models.decoder import DecoderShape, DiffusionDecoder

_TOP_LEVEL = {
    "model.embed_tokens": "embedding",
    "model.norm": "final_norm",
    "lm_head": "lm_head",
}
_IN_LAYER: dict[str, tuple[str, str | int | None]] = {
    "input_layernorm": ("attn_norm", None),
    "post_attention_layernorm": ("mlp_norm", None),
    "self_attn.q_proj": ("qkv_proj", "q"),
    "self_attn.k_proj": ("qkv_proj", "k"),
    "self_attn.v_proj": ("qkv_proj", "v"),
    "self_attn.o_proj": ("out_proj", None),
    "mlp.gate_proj": ("gate_up_proj", 0),
    "mlp.up_proj": ("gate_up_proj", 1),
    "mlp.down_proj": ("down_proj", None),
}


class DreamModel(DiffusionDecoder):
    """Dream in vLLM's parallel layers: biases on q/k/v, grouped queries, logits shifted by one position."""

    @staticmethod
    def decoder_shape(config: object) -> DecoderShape:
        assert isinstance(config, DreamConfig)
        for key, wanted in {"hidden_act": "silu", "rope_type": "default", "use_sliding_window": False}.items():
            value = getattr(config, key)
            if value != wanted:
                raise ValueError(f"{config_file(config)}: {key}={value!r} is not supported for Dream, only {wanted!r}")
        return DecoderShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            vocab_size=config.vocab_size,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
            qkv_bias=True,
            tied_embeddings=config.tie_word_embeddings,
        )

    @staticmethod
    def locate(tensor_name: str) -> tuple[str, str | int | None]:
        module, _, kind = tensor_name.rpartition(".")
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        if match is None:
            return f"{_TOP_LEVEL.get(module, module)}.{kind}", None
        layer, inner = match.groups()
        part, shard = _IN_LAYER.get(inner, (inner, None))
        return f"layers.{layer}.{part}.{kind}", shard
