"""LLaDA: GSAI-ML/LLaDA-8B-Base, LLaDA-8B-Instruct, LLaDA-1.5 (Llama-type blocks; arXiv 2502.09992)."""

import re

from dllm_engine.model_executor.models.configs import LLaDAConfig, config_file
from dllm_engine.model_executor.models.decoder import DecoderShape, DiffusionDecoder

# Keys of config.json that would change the computation, with the one value this model implements.
_REQUIRED_VALUES: dict[str, tuple[object, ...]] = {
    "block_type": ("llama",),
    "activation_type": ("silu", "swiglu"),
    "layer_norm_type": ("rms",),
    "rope": (True,),
    "alibi": (False,),
    "include_bias": (False,),
    "attention_layer_norm": (False,),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "clip_qkv": (None,),
}

_TOP_LEVEL = {
    "wte": "embedding",
    "ln_f": "final_norm",
    "ff_out": "lm_head",
}
_IN_BLOCK: dict[str, tuple[str, str | int | None]] = {
    "attn_norm": ("attn_norm", None),
    "ff_norm": ("mlp_norm", None),
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "attn_out": ("out_proj", None),
    "ff_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "ff_out": ("down_proj", None),
}


class LLaDAModelLM(DiffusionDecoder):
    """LLaDA in vLLM's parallel layers."""

    @staticmethod
    def decoder_shape(config: object) -> DecoderShape:
        assert isinstance(config, LLaDAConfig)
        for key, allowed in _REQUIRED_VALUES.items():
            value = getattr(config, key, allowed[0])
            if value not in allowed:
                raise ValueError(
                    f"{config_file(config)}: {key}={value!r} is not supported for LLaDA, only {allowed[0]!r}"
                )
        return DecoderShape(
            hidden_size=config.d_model,
            intermediate_size=config.mlp_hidden_size,
            num_layers=config.n_layers,
            num_heads=config.n_heads,
            num_kv_heads=config.n_kv_heads,
            vocab_size=config.vocab_size,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
            qkv_bias=config.include_qkv_bias,
            tied_embeddings=config.weight_tying,
        )

    @staticmethod
    def locate(tensor_name: str) -> tuple[str, str | int | None]:
        match = re.fullmatch(r"model\.transformer\.(?:blocks\.(\d+)\.)?(\w+)\.(\w+)", tensor_name)
        if match is None:
            return tensor_name, None
        layer, module, kind = match.groups()
        if layer is None:
            return f"{_TOP_LEVEL.get(module, module)}.{kind}", None
        part, shard = _IN_BLOCK.get(module, (module, None))
        return f"layers.{layer}.{part}.{kind}", shard
