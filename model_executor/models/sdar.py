"""SDAR: JetLM/SDAR-1.7B-Chat, -4B-Chat, -8B-Chat (Qwen3-type blocks; arXiv 2510.06303), and SDAR-30B-A3B-Chat, -Sci,
whose blocks are Qwen3-MoE's."""

from typing import ClassVar

from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.models.dream import DreamModel
from dllm_engine.model_executor.models.names import Shard


class SDARForCausalLM(DiffusionDecoder):
    """SDAR in vLLM's parallel layers: a norm on each head of q and k, and attention that is causal between blocks."""

    modules_outside_layers = DreamModel.modules_outside_layers
    layer_prefix = DreamModel.layer_prefix
    modules_in_layer: ClassVar[dict[str, tuple[str, Shard]]] = {
        **DreamModel.modules_in_layer,
        "self_attn.q_norm": ("q_norm", None),
        "self_attn.k_norm": ("k_norm", None),
    }


class SDARMoeForCausalLM(SDARForCausalLM):
    """SDAR with experts in place of the MLP; a checkpoint names all else as SDAR's does."""
