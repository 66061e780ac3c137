"""Quantized models beside vLLM's quantization methods."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import ModelConfig

FOUR_BITS = ("auto_gptq", "gptq", "gptq_marlin", "auto_awq", "awq", "awq_marlin")
_ON_A_CPU = ("compressed-tensors", *FOUR_BITS)
"""Quantized checkpoints that vLLM has CPU kernels for."""
_FORMATS_ON_A_CPU = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
"""Schemes of compressed-tensors."""
_AT_LOAD_TIME = ("online", "fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp4", "mxfp8")
_EXPERTS_AT_LOAD_TIME = ("int8_per_channel_weight_only", "nvfp4_per_token")
"""vLLM quantizes nothing else with these."""
_INSTEAD = (
    "quantization='fp8_per_channel', or a checkpoint in GPTQ's, AWQ's or compressed-tensors' INT8, FP8 or INT4; "
    "examples/quantize.py makes the latter"
)


def check_quantization(model_config: "ModelConfig", device_type: str) -> None:
    """Raise ``ValueError`` for quantization that vLLM does not run on the device, or that would change nothing."""
    method = model_config.quantization
    if method is None:
        return
    stated = getattr(model_config.hf_config, "quantization_config", None)
    if method in _EXPERTS_AT_LOAD_TIME and not model_config.is_moe:
        raise ValueError(f"quantization={method!r} is for experts, and the model has none; use {_INSTEAD}")
    if device_type != "cpu":
        return
    if stated is None and method in (*_AT_LOAD_TIME, *_EXPERTS_AT_LOAD_TIME):
        _check_at_load_time(method, model_config)
    elif method not in _ON_A_CPU:
        raise ValueError(f"quantization={method!r} does not run on a CPU; use {_INSTEAD}")
    elif stated is not None and model_config.dtype == torch.float32 and _has_four_bits(method, stated):
        raise ValueError(f"quantization={method!r}: on a CPU, 4 bits do not run in float32; set dtype='bfloat16'")
    elif stated is not None and method == "compressed-tensors":
        formats = [stated.get("format"), *(group.get("format") for group in stated.get("config_groups", {}).values())]
        if odd := [name for name in formats if name is not None and name not in _FORMATS_ON_A_CPU]:
            raise ValueError(
                f"quantization={method!r}: the format {odd[0]!r} does not run on a CPU, only "
                f"{', '.join(_FORMATS_ON_A_CPU)}"
            )


def _check_at_load_time(method: str, model_config: "ModelConfig") -> None:
    """Schemes made at load time for which vLLM's CPU build has operators: linear layers in FP8 per channel."""
    asked: Any = model_config.quantization_config
    if asked is not None and asked.targets:
        return  # by module; vLLM raises where it has no kernel
    linear = "fp8_per_tensor" if asked is None else str(asked.linear)
    if linear != "fp8_per_channel_static":
        raise ValueError(f"quantization={method!r}: a CPU cannot quantize to {linear} at load time; use {_INSTEAD}")
    if model_config.is_moe and asked.moe is not None:
        raise ValueError(
            f"quantization={method!r}: a CPU cannot quantize experts at load time; set quantization='online' and "
            f"quantization_config={{'linear': 'fp8_per_channel'}}, which leaves them as they are"
        )


def _has_four_bits(method: str, stated: dict[str, Any]) -> bool:
    return method in FOUR_BITS or "pack-quantized" in str(stated)


def is_group_index(parameter_name: str) -> bool:
    """Return True if a parameter maps input features to groups of weights (GPTQ)."""
    return "g_idx" in parameter_name.rpartition(".")[2]


def may_be_missing(parameter_name: str) -> bool:
    """Return True if a checkpoint may lack a parameter: GPTQ's consecutive groups, and the zero biases that vLLM gives
    experts in GPTQ's format."""
    return is_group_index(parameter_name) or parameter_name.endswith((".w13_bias", ".w2_bias"))


def check_group_index(tensor_name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` unless groups follow each other, as vLLM's kernels have them."""
    if (tensor.diff() < 0).any():
        raise ValueError(
            f"checkpoint tensor {tensor_name!r}: vLLM does not support groups that are out of order (desc_act=true); "
            f"quantize again with desc_act=false"
        )
