"""Dream: Dream-org/Dream-v0-Base-7B, -Instruct-7B, Dream-Coder, DiffuCoder (Qwen2-type blocks; arXiv 2508.15487)."""

from typing import ClassVar

from dllm_engine.model_executor.models.configs import DreamConfig, check_values, config_file
from dllm_engine.model_executor.models.decoder import DecoderShape, DiffusionDecoder
from dllm_engine.model_executor.models.names import Shard

# Keys of config.json that would change the computation, with the value this model implements.
_REQUIRED_VALUES = {"hidden_act": ("silu",), "rope_type": ("default",), "use_sliding_window": (False,)}


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

    @staticmethod
    def decoder_shape(config: object) -> DecoderShape:
        assert isinstance(config, DreamConfig)
        check_values(config, _REQUIRED_VALUES, config_file(config), "Dream")
        return DecoderShape.of(config, qkv_bias=True, rope_theta=config.rope_theta)
