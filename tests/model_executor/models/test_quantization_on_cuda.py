"""Which of vLLM's kernels quantized models of every family get on a GPU, and that their parameters are filled there.

One process loads all of them on vLLM's CUDA platform, in the memory of a CPU; nothing is computed with them.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples import quantize
from tests.support import tiny_checkpoints

pytestmark = pytest.mark.slow

# Marlin's kernels take multiples of 64 or 128.
WIDE = {"hidden_size": 128, "intermediate_size": 256}
WIDE_EXPERTS = {"hidden_size": 128, "dense_intermediate_size": 256}
WIDE_EXPERTS |= {"expert_intermediate_size": 128, "shared_expert_intermediate_size": 128}
FAMILIES = {
    "llada": (tiny_checkpoints.write_llada, {"d_model": 128, "mlp_hidden_size": 256}),
    "dream": (tiny_checkpoints.write_dream, WIDE),
    "sdar": (tiny_checkpoints.write_sdar, WIDE | {"head_dim": 32}),
    "llada_moe": (tiny_checkpoints.write_llada_moe, tiny_checkpoints.ALL_KINDS_OF_EXPERTS | WIDE_EXPERTS),
    "sdar_moe": (tiny_checkpoints.write_sdar_moe, WIDE | {"head_dim": 32, "moe_intermediate_size": 128}),
    "llada2": (tiny_checkpoints.write_llada2, WIDE | {"head_dim": 32, "moe_intermediate_size": 128}),
}
CUTLASS_FP8 = "CutlassFP8ScaledMMLinearKernel"
AT_LOAD_TIME = {
    "fp8_per_tensor": (CUTLASS_FP8, "Fp8PerTensorOnlineMoEMethod TRITON"),
    "fp8_per_channel": (CUTLASS_FP8, "Fp8PtpcOnlineMoEMethod VLLM_CUTLASS"),
    "fp8_per_block": ("CutlassFp8BlockScaledMMKernel", "Fp8PerBlockOnlineMoEMethod TRITON"),
}
CHECKPOINTS = {
    "int8": ("CutlassInt8ScaledMMLinearKernel", "CompressedTensorsW8A8Int8MoEMethod TRITON"),
    "fp8": (CUTLASS_FP8, "CompressedTensorsW8A8Fp8MoEMethod VLLM_CUTLASS"),
    "int4": ("MarlinLinearKernel", "CompressedTensorsWNA16MoEMethod MARLIN"),
    "gptq": ("MarlinLinearKernel", "AutoGPTQMoEMethod MARLIN"),
    "awq": ("MarlinLinearKernel", "AutoAWQMoEMethod MARLIN"),
}
"""Kernels of linear layers and of experts, on a GPU of compute capability 9.0."""
REFUSED = {
    "bitsandbytes": "Unknown quantization method: bitsandbytes",
    "int8_per_channel_weight_only": "is for experts, and the model has none",
}
"""Of LLaDA: vLLM's words, and ours."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What came of each family and scheme."""
    folder, tasks = tmp_path_factory.mktemp("quantized"), {}
    for family, (write, sizes) in FAMILIES.items():
        plain = write(folder / family, **sizes)
        for scheme in CHECKPOINTS:
            model = quantize.quantize(str(plain), folder / f"{family}-{scheme}", scheme)
            tasks[family, scheme] = {"model": str(model), "settings": {}}
            if family == "llada" and scheme in ("gptq", "awq"):
                marlin = f"{scheme}_marlin"
                tasks[family, marlin] = {"model": str(model), "settings": {"quantization": marlin}}
        for method in [*AT_LOAD_TIME, *(REFUSED if family == "llada" else ())]:
            tasks[family, method] = {"model": str(plain), "settings": {"quantization": method}}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.quantized_on_cuda"],
        input=json.dumps(list(tasks.values())),
        capture_output=True,
        text=True,
        env=os.environ | dict.fromkeys(("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "TORCHDYNAMO_DISABLE"), "1"),
        cwd=Path(__file__).parents[3],
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    results = json.loads(done.stdout.splitlines()[-1])
    return {name: (Path(task["model"]), result) for (name, task), result in zip(tasks.items(), results, strict=True)}


@pytest.mark.parametrize("scheme", [*CHECKPOINTS, *AT_LOAD_TIME])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gets_kernels_and_all_numbers_of_its_checkpoint(loaded, family, scheme):
    model, result = loaded[family, scheme]
    linear, experts = (CHECKPOINTS | AT_LOAD_TIME)[scheme]
    has_experts = family in ("llada_moe", "sdar_moe", "llada2")
    found = result.get("error"), result.get("linear"), result.get("experts")
    assert found == (None, linear, experts if has_experts else None)
    if scheme in CHECKPOINTS:
        sums = sums_of(model)
        assert {kind: result["sums"][kind] for kind in sums} == pytest.approx(sums, rel=1e-3)


def sums_of(model: Path) -> dict[str, float]:
    """Of the absolute numbers of a checkpoint's tensors in layers, by their kind."""
    sums: dict[str, float] = defaultdict(float)
    for name, tensor in load_file(model / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if ("blocks." in module or "layers." in module) and kind not in ("weight_shape", "g_idx"):
            sums[kind] += tensor.double().abs().sum().item()
    return dict(sums)


@pytest.mark.parametrize("scheme", ["gptq", "awq"])
def test_marlin_asked_for_by_name_is_what_comes_by_itself(loaded, scheme):
    assert loaded["llada", f"{scheme}_marlin"][1] == loaded["llada", scheme][1]


@pytest.mark.parametrize("method", REFUSED)
def test_methods_that_do_not_apply_are_refused(loaded, method):
    assert REFUSED[method] in loaded["llada", method][1]["error"]
