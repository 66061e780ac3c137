"""Tolerances of the tests of kernels, and the ways to run a Triton kernel.

Kernels run on a GPU where there is one, and under ``TRITON_INTERPRET=1``, which Triton reads when it is imported, on a
CPU. Without either, what a launch would run can still be compiled for a GPU.
"""

import importlib
import os
import pkgutil
from typing import Any

import pytest
import torch

import dllm_engine.kernels
from dllm_engine.kernels._operator import Operator

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
runs_triton = pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def all_operators() -> dict[str, Operator]:
    modules = [f"dllm_engine.kernels.{module.name}" for module in pkgutil.iter_modules(dllm_engine.kernels.__path__)]
    values = [value for module in modules for value in vars(importlib.import_module(module)).values()]
    return {value.name: value for value in values if isinstance(value, Operator)}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))


class CompilesForCuda:
    """Stands in for a kernel: a launch compiles it for its arguments, as though they were on a GPU."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel, self.capability, self.compiled = kernel, capability, []

    def __getitem__(self, grid: tuple[int, ...]) -> "CompilesForCuda":
        return self

    def __call__(self, *arguments: Any, **constants: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
        values = dict(zip(names, arguments, strict=False)) | constants
        types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
        types |= {torch.int32: "*i32", torch.int64: "*i64", torch.float64: "*fp64", int: "i32", float: "fp32"}
        signature = {
            name: "constexpr" if name in constants else types[x.dtype if isinstance(x, torch.Tensor) else type(x)]
            for name, x in values.items()
        }
        aligned = [
            parameter.num
            for parameter, x in zip(self.kernel.params, values.values(), strict=True)
            if not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
            and (isinstance(x, torch.Tensor) or (type(x) is int and x % 16 == 0))
        ]
        source = ASTSource(
            self.kernel,
            signature={name: signature[name] for name in names},
            constexprs={(names.index(name),): x for name, x in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned if names[i] not in constants},
        )
        self.compiled.append(triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options))

    @property
    def shared_memory(self) -> list[int]:
        return [compiled.metadata.shared for compiled in self.compiled]


def compile_launches(monkeypatch: pytest.MonkeyPatch, capability: int = 90) -> list[CompilesForCuda]:
    """Let the launches of all kernels compile them instead."""
    kernels = []
    for module in {importlib.import_module(operator.triton.__module__) for operator in all_operators().values()}:
        for name in vars(module).copy():
            if name.endswith("_kernel"):
                kernels.append(CompilesForCuda(getattr(module, name), capability))
                monkeypatch.setattr(module, name, kernels[-1])
    return kernels
