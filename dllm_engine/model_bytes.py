"""Bytes of a model's weights and activations, computed from its config. Those of weights
are exact, unless the quantization is unknown. Those of activations are an estimate,
which vLLM replaces by a measurement at start.
"""

from pathlib import Path
from typing import Any

from dllm_engine.decoding.page_layout import head_dim_of
from dllm_engine.demo import model_path
from dllm_engine.model_executor.head_chunks import rows_at_once
from dllm_engine.model_executor.loading.files import ADAPTER_CONFIG, read_object
from dllm_engine.model_executor.models.quantization import FLOAT32_BYTES, Quantization
from dllm_engine.options import EngineOptions

VOCABULARY_PADDING = 64
"""vLLM rounds the rows of embedding and head up to this."""


def weight_bytes(
    config: Any,
    tensor_parallel_size: int,
    dtype_bytes: int,
    quantization: Quantization | None = None,
) -> int:
    """Bytes of the weights on one tensor-parallel rank. ``quantization`` None: as in
    the config.
    """
    tp = tensor_parallel_size
    hidden = config.hidden_size
    num_layers = config.num_hidden_layers
    q, kv = _head_widths(config, tp)
    quantization = (
        quantization or Quantization.of(config) or Quantization(8 * dtype_bytes, 0)
    )
    total = num_layers * (
        quantization.matrix_bytes(hidden, q + 2 * kv)
        + quantization.matrix_bytes(q, hidden)
    )
    norms_and_biases = 2 * hidden + config.include_qkv_bias * (q + 2 * kv)
    if getattr(config, "qk_layernorm", False):
        norms_and_biases += 2 * head_dim_of(config)
    rows = -(-config.vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING // tp
    num_tables = 1 if config.tie_word_embeddings else 2
    total += dtype_bytes * (
        num_layers * norms_and_biases + num_tables * rows * hidden + hidden
    )
    mlps = [(num_layers, config.intermediate_size)]
    if (experts := getattr(config, "experts", None)) is not None:
        num_dense = len(experts.dense_layers)
        num_experts = (num_layers - num_dense) * experts.num_experts
        mlps = [
            (num_dense, config.intermediate_size),
            (num_layers - num_dense, experts.shared_intermediate_size),
            (num_experts, experts.intermediate_size),
        ]
        total += num_experts * (hidden * dtype_bytes + experts.has_bias * FLOAT32_BYTES)
    for number, width in mlps:
        if width:
            total += number * quantization.matrix_bytes(hidden, 2 * width // tp)
            total += number * quantization.matrix_bytes(width // tp, hidden)
    return total


def draft_adapter_bytes(
    model: str,
    options: EngineOptions,
    config: Any,
    tensor_parallel_size: int,
    dtype_bytes: int,
) -> int:
    """Bytes of the drafts' adapter on one rank: a share of the matrix before the sum
    over ranks, and all of the matrix after it.
    """
    if options.draft_lora is None:
        return 0
    folder = Path(model_path(model))
    rank = config.family.draft_rank
    if rank is not None and folder.is_dir():
        rank = read_object(folder / options.draft_lora / ADAPTER_CONFIG).get("r")
    if not isinstance(rank, int):
        raise ValueError(
            f"draft_lora={options.draft_lora!r}: {model} has no such adapter of drafts; "
            f"leave it unset"
        )
    q, _ = _head_widths(config, tensor_parallel_size)
    numbers: int = config.num_hidden_layers * rank * (q + config.hidden_size)
    return numbers * dtype_bytes


def activation_bytes(
    config: Any,
    tensor_parallel_size: int,
    dtype_bytes: int,
    rows: int,
    *,
    on_gpu: bool = True,
) -> int:
    """Estimate of the most memory that a forward pass over ``rows`` holds: the larger
    half of a layer, counted tensor by tensor (the fused projections, RoPE in float32),
    or a chunk of filtered logits, which every rank gathers."""
    tp = tensor_parallel_size
    hidden = config.hidden_size
    q, kv = _head_widths(config, tp)
    stream = 2 * hidden * dtype_bytes  # hidden states and their norm
    attention = (2 * q + 2 * kv + q) * dtype_bytes + 2 * FLOAT32_BYTES * q
    experts = getattr(config, "experts", None)
    numbers = (
        3 * config.intermediate_size // tp + hidden
        if experts is None or experts.dense_layers
        else 0
    )
    if experts is not None:
        # As in vLLM's Triton kernels: each expert of a row has a separate output.
        width = experts.intermediate_size // tp
        shared = experts.shared_intermediate_size // tp
        numbers = max(
            numbers,
            experts.top_k * (max(2 * width, hidden) + width) + 3 * shared + 2 * hidden,
        )
    phases = 2 * FLOAT32_BYTES * head_dim_of(config)
    head_rows = min(rows_at_once(config.vocab_size, on_gpu=on_gpu), rows)
    head = head_rows * config.vocab_size * (dtype_bytes + FLOAT32_BYTES)
    return max(
        rows * (stream + max(attention, numbers * dtype_bytes) + phases),
        rows * stream + head,
    )


def _head_widths(config: Any, tensor_parallel_size: int) -> tuple[int, int]:
    """Length of a row's queries on one rank, and of its keys. With more ranks than KV
    heads, each KV head is on several ranks.
    """
    heads = config.num_attention_heads // tensor_parallel_size
    kv_heads = max(1, config.num_key_value_heads // tensor_parallel_size)
    head_dim = head_dim_of(config)
    return heads * head_dim, kv_heads * head_dim
