"""Write a quantized copy of a checkpoint: the linear layers of its layers in 8 or 4
bits, everything else as it is.

python examples/quantize.py demo /tmp/demo-int8 --scheme int8
dllm generate --model /tmp/demo-int8 --dtype bfloat16 "Reverse: Rome Tom Oslo"

Weights are rounded to nearest, a file of the checkpoint at a time. llm-compressor and
GPTQModel also calibrate, which 4 bits need to keep the accuracy.
"""

import argparse
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import quantize as rounded
from compressed_tensors.quantization.utils import calculate_qparams
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file

from dllm_engine.demo import model_path
from dllm_engine.families import FAMILIES

SCHEMES = {  # presets and formats of compressed-tensors
    "int8": ("W8A8", "int-quantized"),
    "fp8": ("FP8_DYNAMIC", "float-quantized"),
    "int4": ("W4A16_ASYM", "pack-quantized"),
}
# Matrices to quantize. A router (`mlp.gate`) decides between experts: it is not one of
# them.
NAMES = [family.names for family in FAMILIES.values()]
LAYERS = "|".join(sorted({re.escape(names.layers) for names in NAMES}))
IN_LAYERS = re.compile(rf"({LAYERS})\.\d+\.(?!mlp\.gate\.).+\.weight")
IGNORED = ["re:.*mlp.gate$", *sorted({names.head for names in NAMES})]


def quantized(weight: torch.Tensor, args: QuantizationArgs) -> dict[str, torch.Tensor]:
    """The tensors that stand for a weight."""
    low, high = weight.unflatten(1, (-1, args.group_size or weight.shape[1])).aminmax(
        dim=2
    )
    scale, zero = calculate_qparams(low, high, args)
    if args.num_bits == 8:
        return {
            "weight": rounded(weight, scale, zero, args, args.pytorch_dtype()),
            "weight_scale": scale,
        }
    scale = scale.half()  # kernels for four bits compute in this type
    values = rounded(weight, scale.float(), zero, args, torch.int8)
    parts = {
        "weight_packed": pack_to_int32(values, 4),
        "weight_zero_point": pack_to_int32(zero, 4, packed_dim=0),
    }
    return parts | {"weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def quantize(
    model: str,
    folder: Path,
    scheme: str,
    *,
    group_size: int = 32,
    ignore: Sequence[str] = (),
) -> Path:
    """Write the quantized copy of ``model``, a folder or a Hugging Face name, to
    ``folder``, and return that. ``ignore``: names of modules to leave as they are, or
    regular expressions behind ``re:``."""
    source = Path(model if Path(model).is_dir() else snapshot_download(model))
    weights = {file.name for file in source.glob("*.safetensors*")}
    shutil.copytree(
        source, folder, ignore=lambda path, _: weights if Path(path) == source else ()
    )
    preset, layout = SCHEMES[scheme]
    group = preset_name_to_scheme(preset, ["Linear"])
    group.weights.group_size = group.weights.group_size and group_size
    stated = QuantizationConfig(
        config_groups={"group_0": group}, format=layout, ignore=[*IGNORED, *ignore]
    )
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = stated.model_dump(mode="json") | {
        "quantization_status": "compressed"
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    left_out = [
        name.removeprefix("re:") if name.startswith("re:") else f"{re.escape(name)}$"
        for name in ignore
    ]
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        for name in filter(IN_LAYERS.fullmatch, list(tensors)):
            module = name.removesuffix(".weight")
            if tensors[name].ndim != 2 or any(re.match(x, module) for x in left_out):
                continue
            parts = quantized(tensors.pop(name).float(), group.weights)
            for kind, part in parts.items():
                tensors[f"{module}.{kind}"] = part.contiguous()
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", help="folder or Hugging Face name of a checkpoint, or 'demo'"
    )
    parser.add_argument("folder", type=Path, help="new folder for the copy")
    parser.add_argument(
        "--scheme", choices=SCHEMES, required=True, help="how to store the weights"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        default=32,
        help="weights per scale in 4 bits (default: %(default)s)",
    )
    options = parser.parse_args()
    quantize(
        model_path(options.model),
        options.folder,
        options.scheme,
        group_size=options.group_size,
    )
