"""SDAR: JetLM/SDAR-1.7B-Chat, -4B-Chat, -8B-Chat (Qwen3-type blocks; arXiv 2510.06303), and SDAR-30B-A3B-Chat, -Sci,
whose blocks are Qwen3-MoE's."""

from typing import ClassVar

from dllm_engine.model_executor.models.configs import SDARConfig, check_values, config_file
from dllm_engine.model_executor.models.decoder import DecoderShape, DiffusionDecoder
from dllm_engine.model_executor.models.dream import DreamModel
from dllm_engine.model_executor.models.names import Shard

# Keys of config.json that would change the computation, with the value this model implements.
_REQUIRED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "rope_type": ("default",),
    "attention_bias": (False,),
}


class SDARForCausalLM(DiffusionDecoder):
    """SDAR in vLLM's parallel layers: a norm on each head of q and k, and attention that is causal between blocks."""

    modules_outside_layers = DreamModel.modules_outside_layers
    layer_prefix = DreamModel.layer_prefix
    modules_in_layer: ClassVar[dict[str, tuple[str, Shard]]] = {
        **DreamModel.modules_in_layer,
        "self_attn.q_norm": ("q_norm", None),
        "self_attn.k_norm": ("k_norm", None),
    }

    @staticmethod
    def decoder_shape(config: object) -> DecoderShape:
        assert isinstance(config, SDARConfig)
        check_values(config, _REQUIRED_VALUES, config_file(config), config.schema.family.name)
        return DecoderShape.of(config, qkv_bias=False, rope_theta=config.rope_theta, qk_norm=True)


class SDARMoeForCausalLM(SDARForCausalLM):
    """SDAR with experts in place of the MLP; a checkpoint names all else as SDAR's does."""
