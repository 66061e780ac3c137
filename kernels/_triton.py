"""Triton where it is installed. Without it kernels can be defined but not launched, which a CPU never does."""

from typing import Any

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:

    class _Absent:
        constexpr: Any = None

        def __getattr__(self, name: str) -> Any:
            raise ImportError("the CUDA kernels need Triton: pip install triton")

    triton = tl = _Absent()

    def jit(kernel: Any) -> Any:
        return kernel


__all__ = ["jit", "tl", "triton"]
