"""LLaDA2: inclusionAI/LLaDA2.0-mini, LLaDA2.0-flash (grouped experts; released code in inclusionAI/dFactory)."""

from typing import ClassVar

from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.models.names import Shard


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
