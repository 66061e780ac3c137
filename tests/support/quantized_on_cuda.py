"""Loads quantized models as vLLM does on a GPU, as far as a machine without one can.

vLLM's CUDA platform chooses quantization methods and kernels. Their parameters are filled and converted in memory of
the CPU. What conversions call of vLLM's compiled operators for CUDA has stand-ins, which give tensors of the right
shapes. Nothing is computed with the weights.

Reads a JSON list of ``{"model", "settings"}`` and writes a list as the last line: what each became, or the error.
"""

import importlib.machinery
import json
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from tests.support.engines import freeze_imports

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dllm_engine.model_executor.models.decoder import DiffusionDecoder

CAPABILITY = (9, 0)
"""Of the GPU that vLLM is told of."""


class StandIn(ModuleType):
    """A module of vLLM's for CUDA that a wheel for CPUs does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments: None


def marlin_repack(weight: torch.Tensor, inputs: int, outputs: int, bits: int, is_a_8bit: bool) -> torch.Tensor:
    return torch.zeros(inputs // 16, outputs * bits // 2, dtype=torch.int32)


def scaled_fp8_quant(out: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, group_shape: object) -> None:
    out.copy_((numbers / scale.reshape(())).clamp(-448, 448))


def quant_per_token(out: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, upper_bound: object) -> None:
    scale.copy_(numbers.abs().amax(-1, keepdim=True).float() / 448)
    out.copy_(numbers / scale)


def pretend_gpu() -> None:
    """Give this process a GPU, before it imports what asks vLLM for its platform."""
    import triton.backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn"):
        sys.modules[f"vllm.{name}"] = StandIn(f"vllm.{name}")
    triton.backends.backends["nvidia"].driver.is_active = lambda: True
    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))
    operators: Any = torch.ops._C
    for kind in ("fp8", "block_fp8", "fp4"):
        setattr(operators, f"cutlass_scaled_mm_supports_{kind}", lambda capability: True)
    operators.cutlass_group_gemm_supported = lambda capability: True
    memory = 80 << 30
    properties = {"name": "a pretended GPU", "multi_processor_count": 132, "total_memory": memory}
    properties |= {"major": CAPABILITY[0], "minor": CAPABILITY[1], "is_integrated": False}
    answers = {
        (torch.cuda, "get_device_properties"): SimpleNamespace(**properties),
        (torch.cuda, "get_device_capability"): CAPABILITY,
        (torch.cuda, "get_device_name"): "a pretended GPU",
        (torch.accelerator, "device_count"): 1,
        (torch.accelerator, "get_memory_info"): (memory, memory),
        (torch.accelerator, "memory_stats"): {},
    }
    answers |= {
        (torch.accelerator, name): 0 for name in ("memory_reserved", "max_memory_allocated", "memory_allocated")
    }
    answers |= {(torch.accelerator, name): None for name in ("empty_cache", "synchronize", "reset_peak_memory_stats")}
    for (module, name), answer in answers.items():
        patch.object(module, name, lambda *of, answer=answer: answer).start()
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    class Platform(NonNvmlCudaPlatform):
        dist_backend = "gloo"

        @classmethod
        def device_count(cls) -> int:
            return 1

    platforms._current_platform = Platform()


def load(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    engine = {"dtype": "float16", "skip_tokenizer_init": True, "max_model_len": 64, "enforce_eager": True}
    config = EngineArgs(model=model, **(engine | settings)).create_engine_config()
    config.load_config.device, config.device_config.device = "cpu", torch.device("cpu")
    with set_current_vllm_config(config):
        return load_with(config)


def load_with(config: "VllmConfig") -> dict[str, Any]:
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader import base_loader
    from vllm.utils.network_utils import get_distributed_init_method, get_open_port

    from dllm_engine.model_executor.loading.files import load_decoder

    if not torch.distributed.is_initialized():
        init_distributed_environment(1, 0, get_distributed_init_method("127.0.0.1", get_open_port()), 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    sums: dict[str, float] = {}
    convert = base_loader.process_weights_after_loading

    def after_loading(model: "DiffusionDecoder", *rest: Any) -> None:
        sums.update(sums_of(model))
        convert(model, *rest)

    with patch.object(base_loader, "process_weights_after_loading", after_loading):
        model = load_decoder(config)
    layer = model.layers[-1]
    return {
        "sums": sums,
        "linear": kernel_of(layer.qkv_proj),
        "experts": kernel_of(getattr(layer.mlp, "experts", None)),
    }


def sums_of(model: "DiffusionDecoder") -> dict[str, float]:
    """Of the absolute numbers in the layers' parameters, by their kind: what was read from the checkpoint, before it is
    converted. vLLM's experts put the names of two of their matrices before it."""
    sums: dict[str, float] = defaultdict(float)
    for name, parameter in model.layers.named_parameters():
        kind = name.rpartition(".")[2].removeprefix("w13_").removeprefix("w2_")
        if not parameter.is_meta:
            sums[kind] += parameter.double().abs().sum().item()
    return sums


def kernel_of(layer: Any) -> str | None:
    """The class that is to compute with a layer's weights."""
    if layer is None:
        return None
    if (routed := getattr(layer, "routed_experts", None)) is not None:
        method = routed.quant_method
        backend = next((value for name, value in vars(method).items() if name.endswith("_backend")), None)
        return f"{type(method).__name__} {getattr(backend, 'name', '')}".strip()
    method, scheme = layer.quant_method, getattr(layer, "scheme", None)
    kernels = [getattr(owner, name, None) for owner in (method, scheme) for name in ("kernel", "fp8_linear")]
    return type(next((kernel for kernel in kernels if kernel is not None), method)).__name__


def main() -> None:
    tasks = json.load(sys.stdin)
    pretend_gpu()
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    freeze_imports()
    # After vLLM's imports, which register shapes for operators that they find.
    operators: Any = torch.ops._C
    operators.gptq_marlin_repack = operators.awq_marlin_repack = marlin_repack
    operators.static_scaled_fp8_quant, operators.dynamic_per_token_scaled_fp8_quant = scaled_fp8_quant, quant_per_token
    results = []
    for task in tasks:
        try:
            results.append(load(**task))
        except Exception as error:  # whatever a user would see
            results.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
