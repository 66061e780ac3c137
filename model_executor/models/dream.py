"""Dream: Dream-org/Dream-v0-Base-7B, -Instruct-7B, Dream-Coder, DiffuCoder (Qwen2-type blocks; arXiv 2508.15487)."""

from typing import ClassVar

from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.models.names import Shard


class DreamModel(DiffusionDecoder):
    """Dream in vLLM's parallel layers: biases on q/k/v, grouped queries, logits shifted by one position."""

    modules_outside_layers: ClassVar[dict[str, str]] = {
        "model.embed_tokens": "embedding",
        "model.norm": "final_norm",
        "lm_head": "lm_head",
    }
    layer_prefix = "model.layers"
    modules_in_layer: ClassVar[dict[str, tuple[str, Shard]]] = {
        "input_layernorm": ("attn_norm", None),
        "post_attention_layernorm": ("mlp_norm", None),
        "self_attn.q_proj": ("qkv_proj", "q"),
        "self_attn.k_proj": ("qkv_proj", "k"),
        "self_attn.v_proj": ("qkv_proj", "v"),
        "self_attn.o_proj": ("out_proj", None),
        "mlp.gate_proj": ("mlp.gate_up_proj", 0),
        "mlp.up_proj": ("mlp.gate_up_proj", 1),
        "mlp.down_proj": ("mlp.down_proj", None),
    }
