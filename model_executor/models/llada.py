"""LLaDA: GSAI-ML/LLaDA-8B-Base, LLaDA-8B-Instruct, LLaDA-1.5 (Llama-type blocks; arXiv 2502.09992)."""

from typing import ClassVar

from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.models.names import Shard


class LLaDAModelLM(DiffusionDecoder):
    """LLaDA in vLLM's parallel layers."""

    modules_outside_layers: ClassVar[dict[str, str]] = {
        "model.transformer.wte": "embedding",
        "model.transformer.ln_f": "final_norm",
        "model.transformer.ff_out": "lm_head",
    }
    layer_prefix = "model.transformer.blocks"
    modules_in_layer: ClassVar[dict[str, tuple[str, Shard]]] = {
        "attn_norm": ("attn_norm", None),
        "ff_norm": ("mlp_norm", None),
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "attn_out": ("out_proj", None),
        "ff_proj": ("mlp.gate_up_proj", 0),
        "up_proj": ("mlp.gate_up_proj", 1),
        "ff_out": ("mlp.down_proj", None),
    }
