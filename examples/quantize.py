"""Write a quantized copy of a checkpoint: the linear layers of its layers in 8 or 4 bits, everything else as it is.

python examples/quantize.py demo /tmp/demo-int4 --scheme int4
dllm generate --model /tmp/demo-int4 --dtype bfloat16 "Reverse: Rome Tom Oslo"

In 4 bits, weights are calibrated on the prompts that the model answers first (GPTQ); without prompts, and experts, are
rounded to nearest. All of the model is in memory for that: for a released one, take llm-compressor or GPTQModel, whose
checkpoints have the same formats. In 8 bits, and without prompts, memory for one file of the checkpoint is enough.
"""

import argparse
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Read when vLLM is imported: the model must be in this process for its inputs to be looked at.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from torch.utils.hooks import RemovableHandle
from vllm.model_executor.layers.linear import LinearBase

from dllm_engine import LLM, DiffusionParams
from dllm_engine.checkpoints import load_config
from dllm_engine.demo import model_path
from dllm_engine.demo.tasks import TASKS, make_examples
from dllm_engine.families import family_of
from dllm_engine.model_executor.models.decoder import MODEL_CLASSES

Tensors = dict[str, torch.Tensor]
IN_LAYERS = re.compile(r"model\.(transformer\.blocks|layers)\.\d+\.(?!mlp\.gate\.)(.+)\.weight")
"""Names of weights to quantize, where they are matrices. A router (``mlp.gate``) decides between experts: it is not."""
IGNORED = ["re:.*mlp.gate$", "model.transformer.ff_out", "lm_head"]
SMALLEST = 1e-7
"""The least scale."""
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Columns of eight as AWQ packs them into an int32."""


def int8(weight: torch.Tensor, group_size: int, seen: torch.Tensor) -> Tensors:
    """INT8 with a scale per output feature; rows are quantized as they come, each with its own scale."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp_min(SMALLEST)
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def fp8(weight: torch.Tensor, group_size: int, seen: torch.Tensor) -> Tensors:
    """FP8 (e4m3) with a scale per output feature; rows as for ``int8``."""
    scale = (weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max).clamp_min(SMALLEST)
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def int4(weight: torch.Tensor, group_size: int, seen: torch.Tensor) -> Tensors:
    """INT4 (W4A16) with a scale and a zero point per ``group_size`` weights, as compressed-tensors packs it."""
    values, scale, zero = four_bits(weight, group_size, seen, symmetric=False)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    parts = {"weight_packed": pack(values), "weight_zero_point": pack(zero.t()).t()}
    return parts | {"weight_scale": scale, "weight_shape": shape}


def gptq(weight: torch.Tensor, group_size: int, seen: torch.Tensor) -> Tensors:
    """INT4 with a scale per group and no zero points, which vLLM does not take in GPTQ's format."""
    values, scale, zero = four_bits(weight, group_size, seen, symmetric=True)
    return {
        "qweight": pack(values).t(),
        "scales": scale.t(),
        "qzeros": pack(zero.t() - 1),  # the format adds 1
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group_size,
    }


def awq(weight: torch.Tensor, group_size: int, seen: torch.Tensor) -> Tensors:
    """The same values as ``int4``, in AWQ's format."""
    values, scale, zero = four_bits(weight, group_size, seen, symmetric=False)

    def packed(numbers: torch.Tensor) -> torch.Tensor:
        return pack(numbers.t().unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1))

    return {"qweight": packed(values), "qzeros": packed(zero), "scales": scale.t()}


def four_bits(
    weight: torch.Tensor, group_size: int, seen: torch.Tensor, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values 0 to 15 ``[rows, columns]``, and scale and zero point of each group ``[rows, groups]``.

    Columns are rounded one after the other, and what rounding one changes in the layer's outputs is made up for in
    those behind it (GPTQ, arXiv 2210.17323).

    Args:
        seen: products of each two input features, summed over inputs of the layer, ``[columns, columns]``.
    """
    weight, columns = weight.clone(), weight.shape[1]
    damped = seen + 0.01 * seen.diagonal().mean() * torch.eye(columns)
    correction = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    values = torch.empty(weight.shape, dtype=torch.int64)
    scales, zeros = [], []
    for column in range(columns):
        if column % group_size == 0:
            group = slice(column, column + group_size)
            scale, zero = grid(weight[:, group], correction.diagonal()[group] ** -2, symmetric)
            scales.append(scale)
            zeros.append(zero)
        values[:, column] = value = ((weight[:, column] / scale).round() + zero).clamp(0, 15).long()
        error = (weight[:, column] - (value - zero) * scale) / correction[column, column]
        weight[:, column + 1 :] -= error[:, None] * correction[column, column + 1 :]
    return values, torch.stack(scales, 1), torch.stack(zeros, 1).long()


def grid(group: torch.Tensor, weight_of: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of each row of a group ``[rows, columns]``, of those that round it with the least error;
    ``weight_of`` is how much an error in each column counts.

    Without a zero point of their own, values reach from -8 to 7 scales. The scale has the sign that puts the largest
    weight where there are 8: with positive scales alone, a large positive weight would be cut off.
    """
    low, high = group.amin(1).clamp_max(0), group.amax(1).clamp_min(0)
    unit = torch.where(high > -low, -high, -low) / 8 if symmetric else (high - low) / 15
    best = torch.full_like(high, torch.inf)
    best_scale, best_zero = torch.ones_like(high), torch.zeros_like(high)
    for share in torch.linspace(0.4, 1, 31):
        # The type that the checkpoint stores.
        scale = (share * unit).half().float()
        scale = torch.where(scale.abs() < SMALLEST, SMALLEST, scale)
        zero = torch.full_like(scale, 8) if symmetric else (-share * low / scale).round().clamp(0, 15)
        values = ((group / scale[:, None]).round() + zero[:, None]).clamp(0, 15)
        error = (((values - zero[:, None]) * scale[:, None] - group) ** 2 * weight_of).sum(1)
        better = error < best
        best = torch.where(better, error, best)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    return best_scale, best_zero


def pack(values: torch.Tensor) -> torch.Tensor:
    """Eight values of four bits along each row per int32, the first in the lowest bits."""
    shifted = values.long().unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    return shifted.sum(-1).to(torch.uint32).view(torch.int32)


def seen_inputs(llm: LLM, prompts: Sequence[Any]) -> Tensors:
    """What ``four_bits`` wants of each linear layer of an engine in this process, while it answers prompts."""
    seen: Tensors = {}

    def watch(decoder: torch.nn.Module) -> list[RemovableHandle]:
        def add(name: str, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            rows = inputs[0].float()
            seen[name] = seen.get(name, 0) + rows.T @ rows

        linears = [(name, module) for name, module in decoder.named_modules() if isinstance(module, LinearBase)]
        return [module.register_forward_pre_hook(partial(add, name)) for name, module in linears]

    (hooks,) = llm.apply_model(watch)
    llm.generate(prompts, DiffusionParams(gen_length=32, block_length=32, steps=8, ignore_eos=True), use_tqdm=False)
    for hook in hooks:
        hook.remove()
    return seen


def compressed_tensors(
    weights: dict[str, Any], layout: str, ignore: Sequence[str], *, rows_too: bool = False
) -> dict[str, Any]:
    rows = {**weights, "strategy": "token", "dynamic": True} if rows_too else None
    group = {"targets": ["Linear"], "weights": {**weights, "dynamic": False}, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "ignore": [*IGNORED, *ignore],
        "config_groups": {"group_0": group},
    }


def quantization_config(scheme: str, group_size: int, ignore: Sequence[str] = ()) -> dict[str, Any]:
    """What ``config.json`` states for vLLM."""
    by_feature = {"symmetric": True, "strategy": "channel"}
    by_group = {"symmetric": False, "strategy": "group", "group_size": group_size}
    four_bits = {"bits": 4, "group_size": group_size}
    # Without it, vLLM guesses by parts of names: an ``mlp.expert_bias`` would leave out ``mlp.experts``.
    left_out = {"modules_to_not_convert": [*IGNORED[1:], *ignore]}
    return {
        "int8": compressed_tensors(
            {"num_bits": 8, "type": "int", **by_feature}, "int-quantized", ignore, rows_too=True
        ),
        "fp8": compressed_tensors(
            {"num_bits": 8, "type": "float", **by_feature}, "float-quantized", ignore, rows_too=True
        ),
        "int4": compressed_tensors({"num_bits": 4, "type": "int", **by_group}, "pack-quantized", ignore),
        "gptq": {"quant_method": "gptq", "sym": True, "desc_act": False, **four_bits},
        "awq": {"quant_method": "awq", "zero_point": True, "version": "gemm", **four_bits, **left_out},
    }[scheme]


SCHEMES: dict[str, Callable[[torch.Tensor, int, torch.Tensor], Tensors]] = {
    "int8": int8,
    "fp8": fp8,
    "int4": int4,
    "gptq": gptq,
    "awq": awq,
}
FOUR_BITS = ("int4", "gptq", "awq")


def quantize(
    model: str,
    folder: Path,
    scheme: str,
    *,
    group_size: int = 32,
    seen: Tensors | None = None,
    ignore: Sequence[str] = (),
) -> Path:
    """Write the quantized copy of the checkpoint ``model``, a folder or a Hugging Face name, to ``folder``, and return
    that.

    Args:
        seen: of ``seen_inputs``, to calibrate on.
        ignore: names of modules to leave as they are, or regular expressions behind ``re:``, which AWQ does not know.
    """
    source = Path(model if Path(model).is_dir() else snapshot_download(model))
    locate = MODEL_CLASSES[family_of(load_config(model)).architecture].locate
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix in {".json", ".jinja", ".txt", ".model"} and not file.name.endswith(".safetensors.index.json"):
            shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config(scheme, group_size, ignore)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weight_map = {}
    for file in sorted(source.glob("*.safetensors")):
        written: Tensors = {}
        for name, tensor in load_file(file).items():
            module = name.removesuffix(".weight")
            if tensor.ndim != 2 or IN_LAYERS.fullmatch(name) is None or is_ignored(module, ignore):
                written[name] = tensor
                continue
            of_layer = (seen or {}).get(locate(name)[0].removesuffix(".weight"), torch.eye(tensor.shape[1]))
            for kind, part in SCHEMES[scheme](tensor.float(), group_size, of_layer).items():
                # Kernels for four bits want scales in the type that they compute in.
                is_half = scheme in FOUR_BITS and part.is_floating_point()
                written[f"{module}.{kind}"] = (part.half() if is_half else part).contiguous()
        save_file(written, folder / file.name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(written, file.name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def is_ignored(module: str, ignore: Sequence[str]) -> bool:
    """As compressed-tensors reads such lists."""
    return any(
        re.match(name.removeprefix("re:"), module) if name.startswith("re:") else name == module for name in ignore
    )


def demo_prompts() -> list[str]:
    """Of tasks that the demo model was trained on."""
    return [example.prompt for task in TASKS for example in make_examples(task, 32, seed=7)]


def calibration(model: str, prompts: Sequence[str]) -> Tensors:
    """``seen_inputs`` of an engine that is started for that."""
    llm = LLM(model, dtype="float32")
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    tokens = [llm.get_tokenizer().apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    return seen_inputs(llm, [{"prompt_token_ids": list(ids["input_ids"])} for ids in tokens])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or Hugging Face name of a checkpoint, or 'demo'")
    parser.add_argument("folder", type=Path, help="new folder for the copy")
    parser.add_argument("--scheme", choices=SCHEMES, required=True, help="how to store the weights")
    parser.add_argument("--group-size", type=int, default=32, help="weights per scale in 4 bits (default: %(default)s)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="calibrate 4 bits on these, a prompt per line")
    args = parser.parse_args()
    prompts = args.prompts.read_text().splitlines() if args.prompts else demo_prompts() if args.model == "demo" else ()
    model = model_path(args.model)
    seen = calibration(model, prompts) if prompts and args.scheme in FOUR_BITS else None
    quantize(model, args.folder, args.scheme, group_size=args.group_size, seen=seen)


if __name__ == "__main__":
    main()
