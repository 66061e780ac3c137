"""Bytes of a model's weights and activations, from its config; exact for weights, but for unknown quantization."""

from dataclasses import dataclass
from typing import Any

from dllm_engine.scheduler.page_layout import head_dim_of

FLOAT32_BYTES = 4
VOCABULARY_PADDING = 64
"""vLLM rounds the rows of embedding and head up to this."""

HEAD_CHUNK_NUMBERS, HEAD_CHUNK_ROWS = 1 << 24, 512
"""Logits that are made at once, and the least rows of them: bounds in ``model_executor/token_prediction.py``."""


@dataclass(frozen=True)
class Quantization:
    """Storage of the linear layers."""

    bits: int
    group_size: int | None = None
    """Weights that share a scale; None: all of an output feature; 0: there are no scales."""
    has_zero_points: bool = False

    @classmethod
    def of(cls, config: Any) -> "Quantization | None":
        """The quantization that a checkpoint's config states; None for a plain checkpoint, and for an unknown one."""
        stated = getattr(config, "quantization_config", None) or {}
        groups = list(stated.get("config_groups", {}).values())
        if stated.get("quant_method") in ("gptq", "awq"):
            size = stated.get("group_size", stated.get("q_group_size", -1))
            return cls(stated.get("bits", stated.get("w_bit", 4)), size if size > 0 else None, True)
        if stated.get("quant_method") == "compressed-tensors" and len(groups) == 1:
            weights = groups[0]["weights"]
            if weights["num_bits"] in (4, 8):
                return cls(weights["num_bits"], weights.get("group_size"), not weights.get("symmetric", True))
        return None

    def matrix_bytes(self, inputs: int, outputs: int) -> int:
        """Weights, scales (float32 for 8 bits, else half precision) and zero points of a linear layer."""
        groups = 1 if self.group_size is None else -(-inputs // self.group_size) if self.group_size else 0
        scales = outputs * groups
        zeros = scales * self.bits // 8 if self.has_zero_points else 0
        return inputs * outputs * self.bits // 8 + scales * (FLOAT32_BYTES if self.bits == 8 else 2) + zeros


QUANTIZATIONS = dict.fromkeys(("fp8", "int8"), Quantization(8))
QUANTIZATIONS |= dict.fromkeys(("int4", "gptq", "awq"), Quantization(4, 128, True))
"""By the name that ``dllm plan --quantization`` has for them."""


def weight_bytes(
    config: Any, tensor_parallel_size: int, dtype_bytes: int, quantization: Quantization | None = None
) -> int:
    """Bytes of the weights on one tensor-parallel rank; without ``quantization``, as the config states it."""
    tp, hidden, num_layers = tensor_parallel_size, config.hidden_size, config.num_hidden_layers
    q, kv = _head_widths(config, tp)
    quantization = quantization or Quantization.of(config) or Quantization(8 * dtype_bytes, 0)
    total = num_layers * (quantization.matrix_bytes(hidden, q + 2 * kv) + quantization.matrix_bytes(q, hidden))
    norms_and_biases = 2 * hidden + config.include_qkv_bias * (q + 2 * kv)
    norms_and_biases += 2 * head_dim_of(config) if getattr(config, "qk_layernorm", False) else 0
    rows = -(-config.vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING // tp
    num_tables = 1 if config.tie_word_embeddings else 2
    total += dtype_bytes * (num_layers * norms_and_biases + num_tables * rows * hidden + hidden)
    mlps = [(num_layers, config.intermediate_size)]
    if (experts := getattr(config, "experts", None)) is not None:
        num_dense = len(experts.dense_layers)
        num_experts = (num_layers - num_dense) * experts.num_experts
        mlps = [(num_dense, config.intermediate_size), (num_layers - num_dense, experts.shared_intermediate_size)]
        mlps.append((num_experts, experts.intermediate_size))
        total += num_experts * (hidden * dtype_bytes + experts.has_bias * FLOAT32_BYTES)
    for number, width in mlps:
        if width:
            total += number * quantization.matrix_bytes(hidden, 2 * width // tp)
            total += number * quantization.matrix_bytes(width // tp, hidden)
    return total


def activation_bytes(config: Any, tensor_parallel_size: int, dtype_bytes: int, rows: int) -> int:
    """Estimate of the memory that a forward pass over ``rows`` holds at most.

    The larger of a layer's two halves over all rows, counted tensor by tensor (the fused projections, RoPE in
    float32), or a chunk of logits that are filtered, which every rank gathers whole.
    """
    tp, hidden = tensor_parallel_size, config.hidden_size
    q, kv = _head_widths(config, tp)
    stream = 2 * hidden * dtype_bytes  # hidden states and their norm
    attention = (2 * q + 2 * kv + q) * dtype_bytes + 2 * FLOAT32_BYTES * q
    experts = getattr(config, "experts", None)
    numbers = 3 * config.intermediate_size // tp + hidden if experts is None or experts.dense_layers else 0
    if experts is not None:  # as vLLM's Triton kernels hold it: each of a row's experts has an output of its own
        width, shared = experts.intermediate_size // tp, experts.shared_intermediate_size // tp
        numbers = max(numbers, experts.top_k * (max(2 * width, hidden) + width) + 3 * shared + 2 * hidden)
    phases = 2 * FLOAT32_BYTES * head_dim_of(config)
    head_rows = min(max(HEAD_CHUNK_NUMBERS // config.vocab_size, HEAD_CHUNK_ROWS), rows)
    head = head_rows * config.vocab_size * (dtype_bytes + FLOAT32_BYTES)
    return max(rows * (stream + max(attention, numbers * dtype_bytes) + phases), rows * stream + head)


def _head_widths(config: Any, tensor_parallel_size: int) -> tuple[int, int]:
    """Numbers of a row's queries on one rank, and of its keys; with more ranks than KV heads each is on several."""
    heads = config.num_attention_heads // tensor_parallel_size
    return heads * head_dim_of(config), max(1, config.num_key_value_heads // tensor_parallel_size) * head_dim_of(config)
