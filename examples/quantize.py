"""Write a quantized copy of a checkpoint: the linear layers of its layers in 8 or 4 bits, everything else as it is.

python examples/quantize.py demo /tmp/demo-int4 --scheme int4
dllm generate --model /tmp/demo-int4 --dtype bfloat16 "Reverse: Rome Tom Oslo"

Weights are rounded to nearest, without calibration data. For a released model, a tool that calibrates (llm-compressor,
GPTQModel) loses less in 4 bits; its checkpoints have the same formats. Files are quantized one by one, so that memory
for one of them is enough.
"""

import argparse
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dllm_engine.demo import model_path

Tensors = dict[str, torch.Tensor]
IN_LAYERS = re.compile(r"model\.(transformer\.blocks|layers)\.\d+\.(?!mlp\.gate\.)(.+)\.weight")
"""Names of weights to quantize, where they are matrices. A router (``mlp.gate``) decides between experts: it is not."""
IGNORED = ["re:.*mlp.gate$", "model.transformer.ff_out", "lm_head"]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Columns of eight as AWQ packs them into an int32."""


def int8(weight: torch.Tensor, group_size: int) -> Tensors:
    """INT8 with a scale per output feature; rows are quantized as they come, each with its own scale."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp_min(1e-8)
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def fp8(weight: torch.Tensor, group_size: int) -> Tensors:
    """FP8 (e4m3) with a scale per output feature; rows as for ``int8``."""
    scale = (weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max).clamp_min(1e-8)
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def int4(weight: torch.Tensor, group_size: int) -> Tensors:
    """INT4 (W4A16) with a scale per group of ``group_size`` weights, as compressed-tensors packs it."""
    values, scale = symmetric_int4(weight, group_size)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {"weight_packed": pack(values), "weight_scale": scale, "weight_shape": shape}


def gptq(weight: torch.Tensor, group_size: int) -> Tensors:
    """The same values as ``int4``, in GPTQ's format."""
    values, scale = symmetric_int4(weight, group_size)
    num_groups, rows = scale.shape[1], weight.shape[0]
    return {
        "qweight": pack(values).t(),
        "scales": scale.t(),
        "qzeros": pack(torch.full((num_groups, rows), 7)),  # the format adds 1
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group_size,
    }


def awq(weight: torch.Tensor, group_size: int) -> Tensors:
    """INT4 with a scale and a zero point per group, in AWQ's format."""
    groups = weight.unflatten(1, (-1, group_size))
    low, high = groups.amin(-1, keepdim=True).clamp_max(0), groups.amax(-1, keepdim=True).clamp_min(0)
    scale = ((high - low) / 15).clamp_min(1e-8)
    zero = (-low / scale).round().clamp(0, 15)
    values = ((groups / scale).round() + zero).clamp(0, 15).flatten(1)

    def packed(columns: torch.Tensor) -> torch.Tensor:
        return pack(columns.long().unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1))

    return {"qweight": packed(values.t()), "qzeros": packed(zero[..., 0].t()), "scales": scale[..., 0].t()}


def symmetric_int4(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values 0 to 15, which stand for -8 to 7, and the scale of each group ``[rows, groups]``."""
    groups = weight.unflatten(1, (-1, group_size))
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).clamp_min(1e-8)
    values = (groups / scale).round().clamp(-8, 7) + 8
    return values.long().flatten(1), scale[..., 0]


def pack(values: torch.Tensor) -> torch.Tensor:
    """Eight values of four bits along each row per int32, the first in the lowest bits."""
    shifted = values.long().unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    return shifted.sum(-1).to(torch.uint32).view(torch.int32)


def compressed_tensors(weights: dict[str, Any], layout: str, *, rows_too: bool) -> dict[str, Any]:
    rows = {**weights, "strategy": "token", "dynamic": True} if rows_too else None
    group = {"targets": ["Linear"], "weights": {**weights, "dynamic": False}, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "ignore": IGNORED,
        "config_groups": {"group_0": group},
    }


def quantization_config(scheme: str, group_size: int) -> dict[str, Any]:
    """What ``config.json`` states for vLLM."""
    by_feature = {"symmetric": True, "strategy": "channel"}
    by_group = {"symmetric": True, "strategy": "group", "group_size": group_size}
    four_bits = {"bits": 4, "group_size": group_size}
    return {
        "int8": compressed_tensors({"num_bits": 8, "type": "int", **by_feature}, "int-quantized", rows_too=True),
        "fp8": compressed_tensors({"num_bits": 8, "type": "float", **by_feature}, "float-quantized", rows_too=True),
        "int4": compressed_tensors({"num_bits": 4, "type": "int", **by_group}, "pack-quantized", rows_too=False),
        "gptq": {"quant_method": "gptq", "sym": True, "desc_act": False, **four_bits},
        "awq": {"quant_method": "awq", "zero_point": True, "version": "gemm", **four_bits},
    }[scheme]


SCHEMES: dict[str, Callable[[torch.Tensor, int], Tensors]] = {
    "int8": int8,
    "fp8": fp8,
    "int4": int4,
    "gptq": gptq,
    "awq": awq,
}


def quantize(model: Path, folder: Path, scheme: str, group_size: int = 32) -> Path:
    """Write the quantized copy of the checkpoint in the folder ``model`` to ``folder``, and return that."""
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix in {".json", ".jinja", ".txt", ".model"} and not file.name.endswith(".safetensors.index.json"):
            shutil.copy(file, folder)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = quantization_config(scheme, group_size)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weight_map = {}
    for file in sorted(model.glob("*.safetensors")):
        written: Tensors = {}
        for name, tensor in load_file(file).items():
            if tensor.ndim != 2 or IN_LAYERS.fullmatch(name) is None:
                written[name] = tensor
                continue
            parts = SCHEMES[scheme](tensor.float(), group_size)
            # Four-bit kernels want scales in the type that they compute in.
            dtype = torch.float32 if scheme in ("int8", "fp8") else torch.float16
            for kind, part in parts.items():
                part = part.to(dtype) if part.dtype == torch.float32 else part
                written[name.removesuffix("weight") + kind] = part.contiguous()
        save_file(written, folder / file.name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(written, file.name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint, or 'demo'")
    parser.add_argument("folder", type=Path, help="new folder for the copy")
    parser.add_argument("--scheme", choices=SCHEMES, required=True, help="how to store the weights")
    parser.add_argument("--group-size", type=int, default=32, help="weights per scale in 4 bits (default: %(default)s)")
    args = parser.parse_args()
    quantize(Path(model_path(args.model)), args.folder, args.scheme, args.group_size)


if __name__ == "__main__":
    main()
