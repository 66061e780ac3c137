"""LLaDA2: inclusionAI/LLaDA2.0-mini, LLaDA2.0-flash (grouped experts; released code in inclusionAI/dFactory)."""

import re
from typing import ClassVar

from dllm_engine.model_executor.models.configs import LLaDA2Config, check_values, config_file
from dllm_engine.model_executor.models.decoder import DecoderShape, DiffusionDecoder
from dllm_engine.model_executor.models.names import Shard

# Keys of config.json that would change the computation, with the value this model implements.
_REQUIRED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "rope_type": ("default",),
    "use_bias": (False,),
    "use_qkv_bias": (False,),
}


class LLaDA2MoeModelLM(DiffusionDecoder):
    """LLaDA2 in vLLM's parallel layers: one projection for q, k and v, RoPE on a part of each head, experts chosen by
    group, and attention that is causal between blocks."""

    modules_outside_layers: ClassVar[dict[str, str]] = {
        "model.word_embeddings": "embedding",
        "model.norm": "final_norm",
        "lm_head": "lm_head",
    }
    layer_prefix = "model.layers"
    modules_in_layer: ClassVar[dict[str, tuple[str, Shard]]] = {
        "input_layernorm": ("attn_norm", None),
        "post_attention_layernorm": ("mlp_norm", None),
        "attention.query_key_value": ("qkv_proj", None),
        "attention.query_layernorm": ("q_norm", None),
        "attention.key_layernorm": ("k_norm", None),
        "attention.dense": ("out_proj", None),
        "mlp.gate_proj": ("mlp.gate_up_proj", 0),
        "mlp.up_proj": ("mlp.gate_up_proj", 1),
        "mlp.shared_experts.gate_proj": ("mlp.shared_expert.gate_up_proj", 0),
        "mlp.shared_experts.up_proj": ("mlp.shared_expert.gate_up_proj", 1),
        "mlp.shared_experts.down_proj": ("mlp.shared_expert.down_proj", None),
    }

    @classmethod
    def locate(cls, tensor_name: str) -> tuple[str, Shard]:
        name, shard = super().locate(tensor_name)
        return name.replace("mlp.gate.expert_bias", "mlp.expert_bias"), shard

    @staticmethod
    def decoder_shape(config: object) -> DecoderShape:
        assert isinstance(config, LLaDA2Config)
        check_values(config, _REQUIRED_VALUES, config_file(config), "LLaDA2")
        # The configs of both have the same keys and values; only the name tells.
        if named := re.search(r"LLaDA-?2\.[1-9]", str(config.name_or_path), re.IGNORECASE):
            raise ValueError(
                f"model {config.name_or_path!r}: {named[0]} also replaces tokens that it has decided, which is not "
                f"supported; take a LLaDA2.0 checkpoint"
            )
        return DecoderShape.of(config, qkv_bias=False, rope_theta=config.rope_theta, qk_norm=config.qk_layernorm)
