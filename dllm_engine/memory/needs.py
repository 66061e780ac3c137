"""What an engine needs of memory: on a CPU of the machine's, which its ranks share, and of each GPU.

A CPU computes with packed weights, which vLLM makes of each matrix while the plain one is there. Tied embeddings stay
beside the packed head.
"""

from dataclasses import dataclass
from typing import Any

from dllm_engine.memory.activations import RankLoad
from dllm_engine.memory.deployment import Deployment, SizingError, load_of, settled
from dllm_engine.memory.plan import Sizing, bytes_of_page, plan
from dllm_engine.memory.weights import attention_matrices, layers_by_kind, mlp_matrices, table_numbers
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


def needs_on_cpu(load: RankLoad, *, copies: int, page_pool: int, overhead: int) -> MemoryNeeds:
    """Of as many ranks as there are ``copies`` on one machine; ``page_pool`` and ``overhead`` are bytes of each."""
    models, dtype_bytes = load.models, load.dtype_bytes
    tied = sum(table_numbers(model, load.num_ranks) for model in models if model.tie_word_embeddings)
    return MemoryNeeds(
        weights=copies * sum(load.weights),
        packed=copies * max(dtype_bytes * _largest_matrix(model, load.num_ranks) for model in models),
        tied=copies * dtype_bytes * tied,
        pages=copies * page_pool * load.options.uses_pages,
        activations=copies * load.activation_bytes,
        overhead=copies * overhead,
    )


def needs_on_gpu(load: RankLoad, page_pool: int | None) -> MemoryNeeds:
    """Of each GPU, at least: what vLLM's libraries take is not counted, and pages of one request unless
    ``page_pool`` is given."""
    options, pages = load.options, page_pool
    if pages is None:
        geometry = options.geometry(load.models[0], load.num_ranks)
        longest = options.method.longest_demand(options.cache, geometry, load.max_model_len)
        pages = options.uses_pages * longest * bytes_of_page(geometry, load.dtype_bytes)
    return MemoryNeeds(sum(load.weights), packed=0, tied=0, pages=pages, activations=load.activation_bytes, overhead=0)


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
    load, dtype = load_of(d, config, max_model_len)
    needs = needs_on_cpu(load, copies=d.tensor_parallel_size, page_pool=d.page_pool, overhead=d.overhead)
    if needs.total > d.memory:
        raise SizingError(
            f"{d.model} in {dtype} needs {readable_size(needs.total)}, and the machine has {readable_size(d.memory)}: "
            f"{needs.as_text()}; {needs.advice(d.memory, '--kv-cache-memory-bytes', '--max-num-batched-tokens')}"
        )
    return plan(deployment), needs
