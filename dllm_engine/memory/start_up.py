"""Refuses an engine that does not fit, before its weights are read."""

from dataclasses import astuple
from typing import TYPE_CHECKING

from dllm_engine.memory.machine import MachineMemory
from dllm_engine.memory.needs import MemoryNeeds, models_of, needs_on_cpu, needs_on_gpu
from dllm_engine.options import EngineOptions
from dllm_engine.sizing import GIB
from dllm_engine.text import readable_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_main_memory(vllm_config: "VllmConfig", machine: MachineMemory) -> None:
    """Raise ``ValueError`` if an engine with all its ranks needs more than is available on a machine without GPUs.

    Quantized weights are not counted, and Ray may place ranks on other machines: both are let pass.
    """
    parallel, config = vllm_config.parallel_config, vllm_config.model_config
    if config.quantization is not None or parallel.distributed_executor_backend not in ("uni", "mp", None):
        return
    options, scheduler = EngineOptions.from_vllm_config(vllm_config), vllm_config.scheduler_config
    needs = needs_on_cpu(
        models_of(config.hf_config, options),
        options,
        ranks=parallel.tensor_parallel_size,
        dtype_bytes=config.dtype.itemsize,
        rows=scheduler.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        page_pool=vllm_config.cache_config.kv_cache_memory_bytes or 0,
        overhead=GIB,
    )
    needs = MemoryNeeds(*(parallel.data_parallel_size * size for size in astuple(needs)))
    if needs.total > machine.available:
        raise ValueError(
            f"{config.model} needs {readable_size(needs.total)} of memory, and {readable_size(machine.available)} of "
            f"{readable_size(machine.total)} are available: {needs.as_text()}; end other programs, or "
            + needs.advice(machine.available, "kv_cache_memory_bytes", "max_num_batched_tokens")
        )


def check_gpu_memory(vllm_config: "VllmConfig", usable: int) -> None:
    """Raise ``ValueError`` if a rank needs more than the ``usable`` bytes of its GPU.

    Quantized weights are not counted, and are let pass.
    """
    config, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    if config.quantization is not None:
        return
    options = EngineOptions.from_vllm_config(vllm_config)
    needs = needs_on_gpu(
        models_of(config.hf_config, options),
        options,
        ranks=parallel.tensor_parallel_size,
        dtype_bytes=config.dtype.itemsize,
        rows=vllm_config.scheduler_config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        page_pool=cache.kv_cache_memory_bytes,
    )
    if needs.total > usable:
        raise ValueError(
            f"{config.model} needs {readable_size(needs.total)} of each GPU, and "
            f"gpu_memory_utilization={cache.gpu_memory_utilization:g} leaves {readable_size(usable)}: "
            f"{needs.as_text()}; raise tensor_parallel_size (now {parallel.tensor_parallel_size}), or "
            + needs.advice(usable, "max_model_len", "max_num_batched_tokens")
        )
