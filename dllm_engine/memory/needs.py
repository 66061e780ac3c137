"""What an engine needs of memory: on a CPU of the machine's, which its ranks share, and of each GPU.

A CPU computes with packed weights, which vLLM makes of each matrix while the plain one is there. Tied embeddings stay
beside the packed head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dllm_engine.memory.activations import activations_of_models
from dllm_engine.memory.deployment import Deployment, SizingError, dtype_of, settled
from dllm_engine.memory.plan import Sizing, bytes_of_page, plan
from dllm_engine.memory.weights import (
    DTYPE_BYTES,
    attention_matrices,
    layers_by_kind,
    mlp_matrices,
    table_numbers,
    weights_of_models,
)
from dllm_engine.options import EngineOptions
from dllm_engine.text import readable_size


@dataclass(frozen=True)
class MemoryNeeds:
    """In bytes."""

    weights: int
    packed: int
    """What packing adds while weights are loaded: the largest matrix of a rank once more."""
    tied: int
    """The packed head beside embeddings that are the same."""
    pages: int
    activations: int
    """An estimate, for the largest batch."""
    overhead: int
    """Of processes and libraries; assumed."""

    @property
    def total(self) -> int:
        """At its peak. Pages and activations are not touched while weights are loaded."""
        serving = self.pages + self.activations
        return self.weights + self.tied + self.overhead + max(self.packed, serving)

    def as_text(self) -> str:
        parts = {
            "weights": self.weights,
            "packed copies": max(self.packed, self.tied),
            "pages": self.pages,
            "activations": self.activations,
            "processes and libraries": self.overhead,
        }
        return ", ".join(f"{name} {readable_size(size)}" for name, size in parts.items() if size)

    def advice(self, there: int, pages: str, rows: str) -> str:
        """What to do where only ``there`` bytes are; ``pages`` and ``rows`` are the settings that limit those."""
        if self.total - self.pages - self.activations < there and self.total - there < self.pages + self.activations:
            return f"lower {pages} (pages) or {rows} (activations)"
        return "take a machine with more memory, a smaller model, or quantized weights"


def needs_on_cpu(
    models: Sequence[Any],
    weights: Sequence[int],
    options: EngineOptions,
    *,
    ranks: int,
    dtype_bytes: int,
    rows: int,
    max_model_len: int,
    page_pool: int,
    overhead: int,
) -> MemoryNeeds:
    """Of all ranks on one machine.

    Args:
        models: configs of the model, and of its guide if it has one.
        weights: bytes of each model on one rank.
        ranks: tensor-parallel ranks; ``page_pool`` and ``overhead`` are bytes of each.
        rows: of the largest batch.
    """
    per_pass = _largest_pass(models, options, ranks, dtype_bytes, rows, max_model_len)
    tables = [table_numbers(model, ranks) * dtype_bytes for model in models]
    return MemoryNeeds(
        weights=ranks * sum(weights),
        packed=ranks * max(dtype_bytes * _largest_matrix(model, ranks) for model in models),
        tied=ranks * sum(table for model, table in zip(models, tables, strict=True) if model.tie_word_embeddings),
        pages=ranks * page_pool * options.uses_pages,
        activations=ranks * per_pass,
        overhead=ranks * overhead,
    )


def needs_on_gpu(
    models: Sequence[Any],
    weights: Sequence[int],
    options: EngineOptions,
    *,
    ranks: int,
    dtype_bytes: int,
    rows: int,
    max_model_len: int,
    page_pool: int | None,
) -> MemoryNeeds:
    """Of each GPU, at least: what vLLM's libraries take is not counted, and pages of one request unless
    ``page_pool`` is given."""
    geometry = options.geometry(models[0], ranks)
    longest = options.method.longest_demand(options.cache, geometry, max_model_len) if options.uses_pages else 0
    return MemoryNeeds(
        weights=sum(weights),
        packed=0,
        tied=0,
        pages=longest * bytes_of_page(geometry, dtype_bytes) if page_pool is None else page_pool,
        activations=_largest_pass(models, options, ranks, dtype_bytes, rows, max_model_len),
        overhead=0,
    )


def _largest_pass(
    models: Sequence[Any], options: EngineOptions, ranks: int, dtype_bytes: int, rows: int, max_model_len: int
) -> int:
    """Bytes of a rank's activations; a guide runs after the model."""
    of_models = activations_of_models(models, ranks, dtype_bytes, rows)
    return of_models + options.method.pass_bytes(rows, max_model_len)


def _largest_matrix(config: Any, ranks: int) -> int:
    """Numbers of the largest matrix that is packed in one piece: the head, a layer's, or all experts of a layer."""
    numbers = [table_numbers(config, ranks)]
    numbers += [inputs * outputs for inputs, outputs in attention_matrices(config, ranks)]
    for _, experts in layers_by_kind(config):
        width, count = config.intermediate_size, 1
        if experts is not None:
            width, count = experts.intermediate_size, experts.num_experts
        numbers += [count * inputs * outputs for inputs, outputs in mlp_matrices(config.hidden_size, width, ranks)]
    return max(numbers)


def plan_on_cpu(deployment: Deployment) -> tuple[Sizing, MemoryNeeds]:
    """What fits a machine's main memory, whose pages are ``page_pool`` bytes per rank.

    Raises:
        SizingError: the model does not fit, or no request does.
        ValueError: the model or an option is unknown.
    """
    d, config, max_model_len = settled(deployment)
    assert d.page_pool is not None
    dtype = dtype_of(d.dtype, config)
    models, dtype_bytes = models_of(config, d.options), DTYPE_BYTES[dtype]
    needs = needs_on_cpu(
        models,
        weights_of_models(models, d.tensor_parallel_size, dtype_bytes, d.quantized),
        d.options,
        ranks=d.tensor_parallel_size,
        dtype_bytes=dtype_bytes,
        rows=d.max_num_batched_tokens,
        max_model_len=max_model_len,
        page_pool=d.page_pool,
        overhead=d.overhead,
    )
    if needs.total > d.memory:
        raise SizingError(
            f"{d.model} in {dtype} needs {readable_size(needs.total)}, and the machine has {readable_size(d.memory)}: "
            f"{needs.as_text()}; {needs.advice(d.memory, '--kv-cache-memory-bytes', '--max-num-batched-tokens')}"
        )
    return plan(deployment), needs


def models_of(config: Any, options: EngineOptions) -> list[Any]:
    """Configs of the model, and of its guide if it has one."""
    if options.guide_model is None:
        return [config]
    from dllm_engine.model_executor.guide.sizes import guide_config  # imports vLLM's layers

    return [config, guide_config(options.guide_model)]
