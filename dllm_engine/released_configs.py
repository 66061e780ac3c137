"""What the config.json of the released checkpoints says of their sizes, for planning before anything is downloaded."""

from typing import Any

_LLADA_8B: dict[str, Any] = {
    "model_type": "llada",
    "d_model": 4096,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "mlp_hidden_size": 12_288,
    "vocab_size": 126_464,
    "embedding_size": 126_464,
    "max_sequence_length": 4096,
    "weight_tying": False,
    "include_qkv_bias": False,
    "torch_dtype": "bfloat16",
}
_DREAM_7B: dict[str, Any] = {
    "model_type": "Dream",
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
RELEASED_CONFIGS: dict[str, dict[str, Any]] = {
    "GSAI-ML/LLaDA-8B-Base": _LLADA_8B,
    "GSAI-ML/LLaDA-8B-Instruct": _LLADA_8B,
    "GSAI-ML/LLaDA-1.5": _LLADA_8B,
    "Dream-org/Dream-v0-Base-7B": _DREAM_7B,
    "Dream-org/Dream-v0-Instruct-7B": _DREAM_7B,
}
