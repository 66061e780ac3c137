"""Quantized checkpoints: those that ``examples/quantize.py`` writes, and the same in
the formats of GPTQ and AWQ.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import (
    pack_to_int32,
    unpack_from_int32,
)
from safetensors.torch import load_file, save_file
from vllm.platforms import current_platform

from dllm_engine.vllm_hooks import refused_settings
from examples import quantize as example

FOUR_BITS = ("int4", "gptq", "awq")
current_platform.import_kernels()
HAS_KERNELS = not current_platform.is_cpu() or hasattr(
    torch.ops._C, refused_settings.FOUR_BITS
)
"""False on a CPU without AVX-512."""
_SIZES = {"bits": 4, "group_size": 32}
# Without modules_to_not_convert, vLLM guesses by parts of names: `mlp.expert_bias`
# would leave out `mlp.experts`.
AWQ = {
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["model.transformer.ff_out", "lm_head"],
}
CONFIGS = {"gptq": _SIZES | {"sym": True, "desc_act": False}, "awq": _SIZES | AWQ}
# vLLM takes GPTQ's format without zero points.
PRESETS = {"gptq": ("W4A16", "pack-quantized"), "awq": ("W4A16_ASYM", "pack-quantized")}
SCHEMES = (*example.SCHEMES, *PRESETS)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Columns of eight as AWQ packs them into an int32."""


def needs_kernels(scheme: str) -> None:
    if scheme in FOUR_BITS and not HAS_KERNELS:
        pytest.skip("vLLM's kernels for 4 bits need AVX-512")


def quantize(
    model: Path, folder: Path, scheme: str, *, ignore: Sequence[str] = ()
) -> Path:
    """Write the quantized copy of ``model``, with groups of 32 in 4 bits, to
    ``folder``, and return that.
    """
    with mock.patch.dict(example.SCHEMES, PRESETS):
        example.quantize(str(model), folder, scheme, ignore=ignore)
    if scheme in CONFIGS:
        tensors = load_file(folder / "model.safetensors")
        for module, (values, zero, scale) in _unpacked(tensors).items():
            parts = _gptq(values, zero) if scheme == "gptq" else _awq(values, zero)
            tensors |= {
                f"{module}.{kind}": part.contiguous() for kind, part in parts.items()
            }
            tensors[f"{module}.scales"] = scale.t().contiguous()
        _rewrite(folder, tensors, {"quant_method": scheme, **CONFIGS[scheme]})
    return folder


def write_rounded(model: Path, folder: Path, scheme: str) -> Path:
    """Write the plain copy of ``model`` with the weights that a scheme rounds to."""
    with mock.patch.dict(example.SCHEMES, PRESETS):
        example.quantize(str(model), folder, scheme)
    tensors = load_file(folder / "model.safetensors")
    for module, (values, zero, scale) in _unpacked(tensors).items():
        zeros, scales = (
            groups.float().repeat_interleave(32, dim=1) for groups in (zero, scale)
        )
        tensors[f"{module}.weight"] = (values - zeros) * scales
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        weight = name.removesuffix("_scale")
        tensors[weight] = tensors[weight].float() * tensors.pop(name)
    _rewrite(folder, tensors, None)
    return folder


def _unpacked(
    tensors: dict[str, torch.Tensor],
) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Values, zero points and scales of the modules in 4 bits, whose tensors are taken
    out.
    """
    found = {}
    for module in [
        name.removesuffix(".weight_packed")
        for name in tensors
        if name.endswith(".weight_packed")
    ]:
        kinds = ("weight_packed", "weight_zero_point", "weight_scale", "weight_shape")
        packed, packed_zero, scale, shape = (
            tensors.pop(f"{module}.{kind}") for kind in kinds
        )
        values = unpack_from_int32(packed, 4, shape)
        zero = unpack_from_int32(
            packed_zero, 4, torch.Size([*shape[:1], scale.shape[1]]), packed_dim=0
        )
        found[module] = values, zero, scale
    return found


def _rewrite(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    quantization: dict[str, object] | None,
) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": quantization
    }
    (folder / "config.json").write_text(
        json.dumps({name: x for name, x in config.items() if x is not None})
    )


def _gptq(values: torch.Tensor, zero: torch.Tensor) -> dict[str, torch.Tensor]:
    """The format adds 1 to zero points."""
    g_idx = torch.arange(values.shape[1], dtype=torch.int32) // 32
    return {
        "qweight": pack_to_int32(values, 4).t(),
        "qzeros": pack_to_int32(zero.t() - 1, 4),
        "g_idx": g_idx,
    }


def _awq(values: torch.Tensor, zero: torch.Tensor) -> dict[str, torch.Tensor]:
    columns = torch.arange(len(values)).unflatten(0, (-1, 8))[:, AWQ_ORDER].flatten()
    return {
        "qweight": pack_to_int32(values.t()[:, columns], 4),
        "qzeros": pack_to_int32(zero.t()[:, columns], 4),
    }
