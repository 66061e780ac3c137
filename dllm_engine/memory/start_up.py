"""Refuses an engine that does not fit, before its weights are read."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from dllm_engine.memory.activations import RankLoad
from dllm_engine.memory.deployment import GIB, models_of
from dllm_engine.memory.machine import MachineMemory
from dllm_engine.memory.needs import needs_on_cpu, needs_on_gpu
from dllm_engine.memory.weights import Quantization, weights_of_models
from dllm_engine.model_executor.models.checkpoint import check_safetensors
from dllm_engine.options import EngineOptions
from dllm_engine.text import readable_size

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_FLOATS = ("F32", "F16", "BF16")
_BYTES = {"I64": 8, "I32": 4, "I16": 2}
"""Of the numbers of a safetensors file that are no floats; of those that are not here, one."""
_LEAST = Quantization(4, 0)
"""Where a checkpoint is not here and its format not known: vLLM has none in fewer bits."""


def check_main_memory(vllm_config: "VllmConfig", machine: MachineMemory) -> None:
    """Raise ``ValueError`` if an engine with all its ranks needs more than is available on a machine without GPUs.

    Ray may place ranks on other machines, so they are let pass.
    """
    parallel, config = vllm_config.parallel_config, vllm_config.model_config
    if parallel.distributed_executor_backend not in ("uni", "mp", None):
        return
    copies = parallel.data_parallel_size * parallel.tensor_parallel_size
    page_pool = vllm_config.cache_config.kv_cache_memory_bytes or 0
    needs = needs_on_cpu(_load_of(vllm_config), copies=copies, page_pool=page_pool, overhead=GIB)
    if needs.total > machine.available:
        raise ValueError(
            f"{config.model} needs {readable_size(needs.total)} of memory, and {readable_size(machine.available)} of "
            f"{readable_size(machine.total)} are available: {needs.as_text()}; end other programs, or "
            + needs.advice(machine.available, "kv_cache_memory_bytes", "max_num_batched_tokens")
        )


def check_gpu_memory(vllm_config: "VllmConfig", usable: int) -> None:
    """Raise ``ValueError`` if a rank needs more than the ``usable`` bytes of its GPU."""
    config, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    needs = needs_on_gpu(_load_of(vllm_config), cache.kv_cache_memory_bytes)
    if needs.total > usable:
        raise ValueError(
            f"{config.model} needs {readable_size(needs.total)} of each GPU, and "
            f"gpu_memory_utilization={cache.gpu_memory_utilization:g} leaves {readable_size(usable)}: "
            f"{needs.as_text()}; raise tensor_parallel_size (now {parallel.tensor_parallel_size}), or "
            + needs.advice(usable, "max_model_len", "max_num_batched_tokens")
        )


def _load_of(vllm_config: "VllmConfig") -> RankLoad:
    config, ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    options = EngineOptions.from_vllm_config(vllm_config)
    models = models_of(config.hf_config, options)
    return RankLoad(
        models,
        weights_on_a_rank(config, models, ranks),
        options,
        num_ranks=ranks,
        dtype_bytes=config.dtype.itemsize,
        rows=vllm_config.scheduler_config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
    )


def weights_on_a_rank(model_config: "ModelConfig", models: Sequence[Any], ranks: int) -> list[int]:
    """Bytes of the weights of each of ``models`` on one of ``ranks``.

    Those of a quantized checkpoint are the sizes of its tensors, split evenly; those that vLLM quantizes while it loads
    are counted by their bits.
    """
    dtype_bytes = model_config.dtype.itemsize
    if model_config.quantization is None:
        return weights_of_models(models, ranks, dtype_bytes, None)
    if getattr(models[0], "quantization_config", None) is None:
        return weights_of_models(models, ranks, dtype_bytes, _at_load_time(model_config))
    weights = weights_of_models(models, ranks, dtype_bytes, Quantization.of(models[0]) or _LEAST)
    stored = stored_bytes(str(model_config.model), dtype_bytes)
    return [stored // ranks or weights[0], *weights[1:]]


def stored_bytes(model: str, dtype_bytes: int) -> int:
    """Bytes of all tensors in a checkpoint's folder, with floats of the model's type; 0 where there is no folder."""
    total = 0
    for path in {path for path, _ in check_safetensors(model).values()}:
        with safe_open(path, framework="pt") as file:
            for part in map(file.get_slice, file.keys()):
                kind, numbers = part.get_dtype(), prod(part.get_shape())
                total += numbers * (dtype_bytes if kind in _FLOATS else _BYTES.get(kind, 1))
    return total


def _at_load_time(model_config: "ModelConfig") -> Quantization:
    asked: Any = model_config.quantization_config
    if asked is not None and asked.targets:
        return _LEAST
    specs = [model_config.quantization] if asked is None else [spec for spec in (asked.linear, asked.moe) if spec]
    bits = 8 if any("8" in str(spec) for spec in specs) else 4
    if asked is None or (asked.linear and asked.moe):
        return Quantization(bits)
    return Quantization(bits, leaves="experts" if asked.linear else "linear")
