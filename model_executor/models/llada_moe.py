"""LLaDA-MoE: inclusionAI/LLaDA-MoE-7B-A1B-Base, -Instruct (OLMoE-type blocks; arXiv 2509.24389)."""

from typing import ClassVar

from dllm_engine.model_executor.models.configs import LLaDAMoEConfig, check_values, config_file
from dllm_engine.model_executor.models.decoder import DecoderShape, DiffusionDecoder
from dllm_engine.model_executor.models.dream import DreamModel
from dllm_engine.model_executor.models.names import Shard

# Keys of config.json that would change the computation, with the values this model implements.
_REQUIRED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "rope_type": ("default",),
    "partial_rotary_factor": (1, None),
    "attention_bias": (False, None),
    "clip_qkv": (None,),
    "norm_topk_prob": (False, None),
    "moe_router_score_function": ("softmax", None),
    "routed_scaling_factor": (1, None),
}


class LLaDAMoEModelLM(DiffusionDecoder):
    """LLaDA-MoE in vLLM's parallel layers: a norm on each head of q and k, and experts in place of the MLP."""

    modules_outside_layers = DreamModel.modules_outside_layers
    layer_prefix = DreamModel.layer_prefix
    modules_in_layer: ClassVar[dict[str, tuple[str, Shard]]] = {
        **DreamModel.modules_in_layer,
        "self_attn.q_norm": ("q_norm", None),
        "self_attn.k_norm": ("k_norm", None),
        "shared_expert.gate_proj": ("mlp.shared_expert.gate_up_proj", 0),
        "shared_expert.up_proj": ("mlp.shared_expert.gate_up_proj", 1),
        "shared_expert.down_proj": ("mlp.shared_expert.down_proj", None),
    }

    @staticmethod
    def decoder_shape(config: object) -> DecoderShape:
        assert isinstance(config, LLaDAMoEConfig)
        check_values(config, _REQUIRED_VALUES, config_file(config), "LLaDA-MoE")
        return DecoderShape.of(config, qkv_bias=False, rope_theta=config.rope_theta, qk_norm=bool(config.qk_layernorm))
