"""LLaDA-MoE: inclusionAI/LLaDA-MoE-7B-A1B-Base, -Instruct (OLMoE-type blocks; arXiv 2509.24389)."""

from typing import ClassVar

from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.models.dream import DreamModel
from dllm_engine.model_executor.models.names import Shard


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
