"""Refuses an engine whose weights do not fit, before they are read. vLLM measures the rest."""

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from dllm_engine.memory.capacity import models_of
from dllm_engine.memory.weights import Quantization, weight_bytes
from dllm_engine.model_executor.loading.checkpoint import check_safetensors
from dllm_engine.options import EngineOptions
from dllm_engine.text import readable_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CPU_PAGE_POOL_BYTES = 1 << 30
"""Memory for pages on a CPU, unless ``kv_cache_memory_bytes`` (or VLLM_CPU_KVCACHE_SPACE) is set. vLLM's own default of
92% of all memory fails on a machine where anything else runs."""
CGROUP = Path("/sys/fs/cgroup")
"""Files of the control group that a container shows its processes."""


def check_main_memory(vllm_config: "VllmConfig") -> None:
    """Raise ``ValueError`` if weights and pages of all ranks need more than a machine without GPUs has available."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if parallel.distributed_executor_backend not in ("uni", "mp", None):
        return  # Ray may place ranks on other machines
    ranks = parallel.data_parallel_size * parallel.tensor_parallel_size
    pages = ranks * (cache.kv_cache_memory_bytes or 0)
    weights = ranks * _weights_of_a_rank(vllm_config)
    if weights + pages > (available := available_memory()):
        raise ValueError(
            f"{vllm_config.model_config.model} needs {readable_size(weights + pages)} of memory (weights "
            f"{readable_size(weights)}, pages {readable_size(pages)}), and {readable_size(available)} are available; "
            f"end other programs, lower kv_cache_memory_bytes (pages), or take a smaller model or quantized weights"
        )


def check_gpu_memory(vllm_config: "VllmConfig", usable: int) -> None:
    """Raise ``ValueError`` if a rank's weights need more than the ``usable`` bytes of its GPU."""
    ranks, share = vllm_config.parallel_config.tensor_parallel_size, vllm_config.cache_config.gpu_memory_utilization
    if (weights := _weights_of_a_rank(vllm_config)) > usable:
        raise ValueError(
            f"the weights of {vllm_config.model_config.model} need {readable_size(weights)} of each GPU, and "
            f"gpu_memory_utilization={share:g} leaves {readable_size(usable)}; raise it or tensor_parallel_size (now "
            f"{ranks}), or take quantized weights"
        )


def _weights_of_a_rank(vllm_config: "VllmConfig") -> int:
    """Bytes of the weights on one rank. A quantized checkpoint counts as its files; linear layers that vLLM quantizes
    while it loads them count in 4 bits, the fewest that it has."""
    config, ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    model, *guide = models_of(config.hf_config, EngineOptions.from_vllm_config(vllm_config))
    is_stated = getattr(config.hf_config, "quantization_config", None) is not None
    quantization = None if config.quantization is None or is_stated else Quantization(4, 0)
    files = {path for path, _ in check_safetensors(str(config.model)).values()} if is_stated else ()
    stored = sum(Path(path).stat().st_size for path in files) // ranks
    weights = stored or weight_bytes(model, ranks, config.dtype.itemsize, quantization)
    return weights + sum(weight_bytes(each, ranks, config.dtype.itemsize) for each in guide)


def available_memory() -> int:
    """Bytes that this machine, or the container that this process is in, has left."""
    available = int(psutil.virtual_memory().available)
    limit, current = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.is_file() and current.is_file() and (most := limit.read_text().strip()).isdecimal():
        available = min(available, max(int(most) - int(current.read_text()), 0))
    return available
