"""Bytes of a model's weights and activations, from its config alone.

Those of weights are exact, except for unknown kinds of quantization.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dllm_engine.scheduler.page_layout import head_dim_of

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
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
        scale_bytes = FLOAT32_BYTES if self.bits == 8 else 2
        zeros = scales * self.bits // 8 if self.has_zero_points else 0
        return inputs * outputs * self.bits // 8 + scales * scale_bytes + zeros


QUANTIZATIONS = {
    "fp8": Quantization(8),
    "int8": Quantization(8),
    "int4": Quantization(4, 128, True),
    "gptq": Quantization(4, 128, True),
    "awq": Quantization(4, 128, True),
}
"""By the name that ``dllm plan --quantization`` has for them."""


def attention_matrices(config: Any, tensor_parallel_size: int) -> list[tuple[int, int]]:
    """Inputs and outputs of a layer's matrix products on one rank: q, k and v; the attention's output."""
    tp, hidden, head_dim = tensor_parallel_size, config.hidden_size, head_dim_of(config)
    heads, kv_heads = config.num_attention_heads // tp, max(1, config.num_key_value_heads // tp)
    return [(hidden, (heads + 2 * kv_heads) * head_dim), (heads * head_dim, hidden)]


def mlp_matrices(hidden: int, width: int, tensor_parallel_size: int) -> list[tuple[int, int]]:
    """Inputs and outputs of an MLP's matrix products on one rank: gate and up; down."""
    return [(hidden, 2 * width // tensor_parallel_size), (width // tensor_parallel_size, hidden)]


def layers_by_kind(config: Any) -> list[tuple[int, Any]]:
    """Number of layers with an MLP (None), and with experts (their ``ExpertShape``)."""
    experts, num_layers = getattr(config, "experts", None), config.num_hidden_layers
    num_dense = num_layers if experts is None else len(experts.dense_layers)
    return [(number, kind) for number, kind in ((num_dense, None), (num_layers - num_dense, experts)) if number]


def weights_of_models(
    models: Sequence[Any], tensor_parallel_size: int, dtype_bytes: int, quantization: Quantization | None
) -> list[int]:
    """``weight_bytes`` of the model, and of its guide if it has one, which is not quantized."""
    return [
        weight_bytes(model, tensor_parallel_size, dtype_bytes, quantization if model is models[0] else None)
        for model in models
    ]


def weight_bytes(
    config: Any, tensor_parallel_size: int, dtype_bytes: int, quantization: Quantization | None = None
) -> int:
    """Bytes of the weights on one tensor-parallel rank; without ``quantization``, as the config states it."""
    tp, hidden = tensor_parallel_size, config.hidden_size
    plain = Quantization(8 * dtype_bytes, 0)
    quantization = quantization or Quantization.of(config) or plain
    attention = attention_matrices(config, tp)
    linears = config.num_hidden_layers * sum(quantization.matrix_bytes(*sizes) for sizes in attention)
    numbers = config.num_hidden_layers * 2 * hidden
    if config.include_qkv_bias:
        numbers += config.num_hidden_layers * attention[0][1]
    if getattr(config, "qk_layernorm", False):
        numbers += config.num_hidden_layers * 2 * head_dim_of(config)
    float32_numbers = 0
    for number, experts in layers_by_kind(config):
        width = config.intermediate_size
        if experts is not None:
            width = experts.shared_intermediate_size
            matrices = mlp_matrices(hidden, experts.intermediate_size, tp)
            linears += number * experts.num_experts * sum(quantization.matrix_bytes(*matrix) for matrix in matrices)
            router = number * hidden * experts.num_experts
            numbers += router if experts.groups is None else 0
            float32_numbers += number * experts.num_experts * experts.has_bias + (router if experts.groups else 0)
        if width:
            linears += number * sum(quantization.matrix_bytes(*matrix) for matrix in mlp_matrices(hidden, width, tp))
    tables = 1 if config.tie_word_embeddings else 2
    numbers += tables * table_numbers(config, tp) + hidden
    return linears + dtype_bytes * numbers + FLOAT32_BYTES * float32_numbers


def table_numbers(config: Any, tensor_parallel_size: int) -> int:
    """Numbers of the embeddings, or of the head, on one tensor-parallel rank."""
    rows: int = -(-config.vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING // tensor_parallel_size
    return rows * int(config.hidden_size)


def activation_bytes(config: Any, tensor_parallel_size: int, dtype_bytes: int, rows: int) -> int:
    """Estimate of the memory that a forward pass over ``rows`` holds at most.

    The larger of a layer's two halves over all rows, counted tensor by tensor (the fused projections, RoPE in
    float32), or a chunk of logits that are filtered, which every rank gathers whole.
    """
    tp, hidden, head_dim = tensor_parallel_size, config.hidden_size, head_dim_of(config)
    q = config.num_attention_heads // tp * head_dim
    kv = max(1, config.num_key_value_heads // tp) * head_dim
    stream = 2 * hidden * dtype_bytes  # hidden states and their norm
    attention = (2 * q + 2 * kv + q) * dtype_bytes + 2 * FLOAT32_BYTES * q
    mlp = 0
    for _, experts in layers_by_kind(config):
        if experts is None:
            numbers = 3 * config.intermediate_size // tp + hidden
        else:  # as vLLM's Triton kernels hold it: each of a row's experts has an output of its own
            width, shared = experts.intermediate_size // tp, experts.shared_intermediate_size // tp
            numbers = experts.top_k * (max(2 * width, hidden) + width) + 3 * shared + 2 * hidden
        mlp = max(mlp, numbers * dtype_bytes)
    phases = 2 * FLOAT32_BYTES * head_dim
    head_rows = min(max(HEAD_CHUNK_NUMBERS // config.vocab_size, HEAD_CHUNK_ROWS), rows)
    head = head_rows * config.vocab_size * (dtype_bytes + FLOAT32_BYTES)
    return max(rows * (stream + max(attention, mlp) + phases), rows * stream + head)
