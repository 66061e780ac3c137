"""Quantized checkpoints of every family under vLLM's quantization methods, and what a CPU refuses."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples import quantize
from tests.model_executor.models.test_forward import dense_logits
from tests.support import tiny_checkpoints
from tests.support.engines import runner_of, start_engine

# CPU kernels for four bits take multiples of 32.
FAMILIES = {
    "llada": (tiny_checkpoints.write_llada, {"mlp_hidden_size": 128, "include_qkv_bias": True}),
    "dream": (tiny_checkpoints.write_dream, {"intermediate_size": 128}),
    "llada_moe": (
        tiny_checkpoints.write_llada_moe,
        {**tiny_checkpoints.ALL_KINDS_OF_EXPERTS, "dense_intermediate_size": 128, "moe_layer_freq": [0, 0]},
    ),
}
"""LLaDA-MoE's experts have no kernels on a CPU without AMX: its layers are dense ones here."""
IDS = [11, 12, 13, 14, tiny_checkpoints.MASK, 15, tiny_checkpoints.MASK, tiny_checkpoints.MASK]
EACH_SCHEME = [(family, scheme) for family in FAMILIES for scheme in quantize.SCHEMES if family != "llada_moe"]
EACH_SCHEME += [("llada_moe", "int8"), ("llada_moe", "gptq")]


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    folders = {family: tmp_path_factory.mktemp(family) / "plain" for family in FAMILIES}
    return {family: write(folders[family], **sizes) for family, (write, sizes) in FAMILIES.items()}


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Eight values of four bits of each int32, along rows."""
    return (packed[:, :, None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15).flatten(1)


def per_column(groups: torch.Tensor) -> torch.Tensor:
    """Of each column, from those of groups of 32 of them."""
    return groups.float().repeat_interleave(32, dim=1)


def dequantized(parts: dict[str, torch.Tensor], scheme: str) -> torch.Tensor:
    if scheme in ("int8", "fp8"):
        return parts["weight"].float() * parts["weight_scale"]
    if scheme == "int4":
        assert parts["weight_shape"].tolist() == list(unpack(parts["weight_packed"]).shape)
        return (unpack(parts["weight_packed"]) - 8) * per_column(parts["weight_scale"])
    if scheme == "gptq":
        zeros = unpack(parts["qzeros"]) + 1
        return (unpack(parts["qweight"].t().contiguous()) - per_column(zeros.t())) * per_column(parts["scales"].t())
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # where AWQ has the columns 0 to 7
    values, zeros = (unpack(parts[name]).unflatten(1, (-1, 8))[:, :, order].flatten(1) for name in ("qweight", "qzeros"))
    return (values.t() - per_column(zeros.t())) * per_column(parts["scales"].t())


def write_dequantized(quantized: Path, folder: Path, scheme: str) -> Path:
    """The plain checkpoint of a quantized one's rounded weights."""
    folder.mkdir()
    tensors, layers = {}, {}
    for name, tensor in load_file(quantized / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if quantize.IN_LAYERS.fullmatch(f"{module}.weight") and "norm" not in module and kind != "bias":
            layers.setdefault(module, {})[kind] = tensor
        else:
            tensors[name] = tensor
    assert layers
    tensors |= {f"{module}.weight": dequantized(parts, scheme).contiguous() for module, parts in layers.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return ((logits.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize(("family", "scheme"), EACH_SCHEME)
def test_logits_are_those_of_the_rounded_weights(engines, plain, tmp_path, family, scheme):
    quantized = quantize.quantize(str(plain[family]), tmp_path / "quantized", scheme)
    rounded = write_dequantized(quantized, tmp_path / "rounded", scheme)
    (actual,) = dense_logits(engines(quantized, dtype="bfloat16"), IDS)
    (expected,) = dense_logits(engines(rounded), IDS)
    # 8 bits also round the inputs of each layer; 4 bits compute in bfloat16.
    assert distance(actual, expected) < (0.1 if scheme in ("int8", "fp8") else 0.03)
