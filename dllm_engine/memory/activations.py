"""An estimate of the activations that vLLM measures when an engine starts."""

from dataclasses import dataclass
from typing import Any

from dllm_engine.memory.weights import FLOAT32_BYTES, layers_by_kind
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.page_layout import head_dim_of

HEAD_CHUNK_NUMBERS, HEAD_CHUNK_ROWS = 1 << 24, 512
"""Logits that are made at once, and the least rows of them: bounds in ``model_executor/token_prediction.py``."""
FILTER_BYTES = FLOAT32_BYTES
"""What top-p and top-k hold for each logit: its float32, or what takes its place."""


@dataclass(frozen=True)
class RankLoad:
    """What one tensor-parallel rank of an engine works on."""

    models: list[Any]
    """Configs of the model, and of its guide if it has one."""
    weights: list[int]
    """Bytes of each of them."""
    options: EngineOptions
    num_ranks: int
    dtype_bytes: int
    rows: int
    """Of the largest batch."""
    max_model_len: int

    @property
    def activation_bytes(self) -> int:
        """Of the largest batch. The guide runs after the model."""
        of_models = max(activation_bytes(model, self.num_ranks, self.dtype_bytes, self.rows) for model in self.models)
        return of_models + self.options.method.pass_bytes(self.rows, self.max_model_len)


def activation_bytes(config: Any, tensor_parallel_size: int, dtype_bytes: int, rows: int) -> int:
    """Estimate of the memory that a forward pass over ``rows`` holds at most.

    The larger of a layer's two halves over all rows, counted tensor by tensor (the fused projections, RoPE in
    float32), or a chunk of logits that are filtered, which every rank gathers whole.
    """
    tp, hidden, head_dim = tensor_parallel_size, config.hidden_size, head_dim_of(config)
    q = config.num_attention_heads // tp * head_dim
    kv = max(1, config.num_key_value_heads // tp) * head_dim
    stream = 2 * hidden * dtype_bytes  # hidden states and their norm
    attention = (2 * q + 2 * kv + q) * dtype_bytes + 2 * 4 * q
    mlp = _mlp_numbers(config, tp) * dtype_bytes
    phases = 2 * 4 * head_dim
    head_rows = min(max(HEAD_CHUNK_NUMBERS // config.vocab_size, HEAD_CHUNK_ROWS), rows)
    head = head_rows * config.vocab_size * (dtype_bytes + FILTER_BYTES)
    return max(rows * (stream + max(attention, mlp) + phases), rows * stream + head)


def _mlp_numbers(config: Any, tensor_parallel_size: int) -> int:
    """The most numbers that a layer's feed-forward branch holds for a row."""
    tp, hidden, most = tensor_parallel_size, config.hidden_size, 0
    for _, experts in layers_by_kind(config):
        if experts is None:
            most = max(most, 3 * config.intermediate_size // tp + hidden)
        else:  # as vLLM's Triton kernels hold it: each of a row's experts has an output of its own
            width, shared = experts.intermediate_size // tp, experts.shared_intermediate_size // tp
            most = max(most, experts.top_k * (max(2 * width, hidden) + width) + 3 * shared + 2 * hidden)
    return most
