"""An in-process engine with random weights of a given shape, for measuring: values do not change the time."""

import os
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from dllm_engine import LLM
from dllm_engine.bench.random_model import random_engine


def llada_config(
    hidden_size: int, num_layers: int, num_heads: int, vocab_size: int, max_model_len: int, dtype: str
) -> dict[str, Any]:
    """A LLaDA's ``config.json``, with an MLP three times as wide, as in LLaDA-8B."""
    return {
        "model_type": "llada",
        "d_model": hidden_size,
        "n_heads": num_heads,
        "n_layers": num_layers,
        "mlp_hidden_size": 3 * hidden_size,
        "vocab_size": vocab_size,
        "embedding_size": vocab_size,
        "max_sequence_length": max_model_len,
        "mask_token_id": vocab_size - 1,
        "eos_token_id": vocab_size - 2,
        "torch_dtype": dtype,
    }


def random_llada(
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int,
    max_model_len: int,
    dtype: str,
    max_num_seqs: int,
    **settings: Any,
) -> LLM:
    """A LLaDA of the given shape without tokenizer.

    ``settings`` are further arguments of ``LLM``.
    """
    config = llada_config(hidden_size, num_layers, num_heads, vocab_size, max_model_len, dtype)
    return random_engine(
        config,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        **{"max_num_batched_tokens": max_num_seqs * max_model_len} | settings,
    )
