"""Weights in the layout that a CPU computes with, made module by module while a checkpoint is read.

vLLM packs all modules after loading, the table of embeddings too, which no product reads, and keeps the head's plain
weights beside the packed ones. Here a module is packed as soon as its weights are complete, and its plain weights are
freed. What vLLM does afterwards finds nothing left to pack. GPUs have no packed layout.
"""

from collections.abc import Iterable

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)


class LookupMethod(UnquantizedEmbeddingMethod):
    """Weights whose rows are looked up, and which no matrix product reads."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave them as they are."""


class HeadMethod(UnquantizedEmbeddingMethod):
    """Weights of a head; packed only, unless the embeddings are the same."""

    is_tied = False

    def tie_weights(self, layer: nn.Module, embed_tokens: VocabParallelEmbedding) -> nn.Module:
        self.is_tied = True
        tied: nn.Module = super().tie_weights(layer, embed_tokens)
        return tied

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if not layer.weight.is_cuda:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=not self.is_tied)


def embedding_table(vocab_size: int, hidden_size: int) -> VocabParallelEmbedding:
    """vLLM's embedding, which a CPU holds once."""
    table = VocabParallelEmbedding(vocab_size, hidden_size)
    table.quant_method = LookupMethod()
    return table


def output_head(
    vocab_size: int, hidden_size: int, quant_config: QuantizationConfig | None, prefix: str
) -> ParallelLMHead:
    """vLLM's head, which a CPU holds once."""
    head = ParallelLMHead(vocab_size, hidden_size, quant_config=quant_config, prefix=prefix)
    if type(head.quant_method) is UnquantizedEmbeddingMethod:
        head.quant_method = HeadMethod()
    return head


class Packer:
    """Packs the modules of a model on a CPU while its parameters are filled."""

    def __init__(self, model: nn.Module, shards: Iterable[tuple[str, object]]) -> None:
        """``shards``: each parameter's name, and the parts of it that are still to be filled."""
        self._model = model
        self._missing: dict[str, set[tuple[str, object]]] = {}
        for name, shard in shards:
            self._missing.setdefault(name.rpartition(".")[0], set()).add((name, shard))

    def fill(self, name: str, shard: object) -> list[str]:
        """Take note that a shard is filled; returns the names of parameters that were packed then, and are freed when
        nothing refers to them."""
        module_name = name.rpartition(".")[0]
        missing = self._missing[module_name]
        missing.discard((name, shard))
        module = self._model.get_submodule(module_name)
        method, weight = getattr(module, "quant_method", None), getattr(module, "weight", None)
        if missing or not isinstance(method, UnquantizedLinearMethod | HeadMethod):
            return []
        assert isinstance(weight, torch.Tensor)
        # Two dimensions: not packed yet. When weights are read again, vLLM packs them itself.
        if weight.device.type != "cpu" or weight.dim() != 2:
            return []
        method.process_weights_after_loading(module)
        return [f"{module_name}.weight"]
