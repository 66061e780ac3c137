"""Check of the sizes in a config against the weights, or against the memory if there
are no weights.

Without it, a config with far too many layers would take minutes, because layers are
made one by one.
"""

import math
import re

import psutil
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from dllm_engine.model_bytes import weight_bytes
from dllm_engine.model_executor.loading.files import FLOAT_TYPES, check_safetensors
from dllm_engine.model_executor.models.configs import Config
from dllm_engine.text import readable_size, shortened

_MOST_PACKED = 16
"""The most weights in a stored number of a quantized checkpoint: 2-bit weights in 32
bits.
"""
_STORED_SIZES = (
    ("vocab_size", "hidden_size"),
    ("intermediate_size", "hidden_size"),
    ("moe_intermediate_size", "hidden_size", "num_experts"),
    ("expert_intermediate_size", "hidden_size", "num_experts"),
    ("num_attention_heads", "head_dim", "hidden_size"),
)
"""Pairs of keys whose product is the size of a tensor that every checkpoint with these
keys has.
"""


def check_sizes(model: str, config: Config, vllm_config: VllmConfig) -> None:
    """Raise ``ValueError`` if a model's config does not suit its weights, or if random
    weights do not fit this machine.
    """
    if vllm_config.load_config.load_format == "dummy":
        _check_memory(model, config, vllm_config)
    else:
        # Refuse unreadable weights before any process is started for them.
        _check_tensors(model, config)


def _check_memory(model: str, config: Config, vllm_config: VllmConfig) -> None:
    ranks = vllm_config.parallel_config.tensor_parallel_size
    needed = weight_bytes(config, ranks, vllm_config.model_config.dtype.itemsize)
    memory = psutil.virtual_memory().total
    if not current_platform.is_cpu():
        memory += current_platform.get_device_total_memory()
    if needed > memory:
        raise ValueError(
            f"{model}/config.json: its sizes make weights of {readable_size(needed)} "
            f"on each rank, and this machine has {readable_size(memory)} of memory"
        )


def _check_tensors(model: str, config: Config) -> None:
    tensors = check_safetensors(model)
    if not tensors:
        return  # the model has to be downloaded
    key_names = config.family.key_names
    where = f"{model}/config.json"
    layer = re.compile(rf"{re.escape(config.family.names.layers)}\.([0-9]+)\.")
    layers = {match[1] for name in tensors if (match := layer.match(name))}
    stated = config.num_hidden_layers
    if layers and stated > len(layers):
        key = key_names.get("num_hidden_layers", "num_hidden_layers")
        raise ValueError(f"{where}: {key}={stated}, but the weights have {len(layers)}")
    is_quantized = getattr(config, "quantization_config", None) is not None
    stored = sum(tensor.size for tensor in tensors.values()) * (
        _MOST_PACKED if is_quantized else 1
    )
    for sizes in _STORED_SIZES:
        values = {
            key_names.get(name, name): getattr(config, name, None) or 1
            for name in sizes
        }
        if math.prod(values.values()) > stored:
            text = " × ".join(f"{key}={value}" for key, value in values.items())
            raise ValueError(
                f"{where}: {text} is more than the {stored} numbers that the weights "
                f"hold"
            )
    if is_quantized:
        return
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOAT_TYPES:
            raise ValueError(
                f"{tensor.path}: {shortened(name)} is of type {tensor.dtype}, not "
                f"{', '.join(FLOAT_TYPES)}"
            )
