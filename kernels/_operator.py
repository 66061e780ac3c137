"""Functions of tensors with two bodies: one for CPUs, and one that launches Triton kernels on CUDA devices."""

import pkgutil
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Operator(Generic[_P, _R]):
    """Calls the body for the device of its first argument."""

    def __init__(self, cpu: Callable[_P, _R], path: str) -> None:
        self.__doc__ = cpu.__doc__
        self.name = path.partition(":")[2]
        self.cpu, self._path = cpu, path

    @cached_property
    def triton(self) -> Callable[..., _R]:
        """The body for CUDA devices, imported on first use: a CPU installation may lack Triton."""
        try:
            launch: Callable[..., _R] = pkgutil.resolve_name(f"dllm_engine.kernels.triton.{self._path}")
        except ModuleNotFoundError as error:
            raise ImportError("the CUDA kernels need Triton: pip install triton") from error
        return launch

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        first: Any = args[0]
        return (self.triton if first.is_cuda else self.cpu)(*args, **kwargs)


def operator(path: str) -> Callable[[Callable[_P, _R]], Operator[_P, _R]]:
    """Make an operator from its body for CPUs.

    Args:
        path: the body for CUDA devices, ``module:function`` in ``triton/``. It takes the same arguments; those beyond
            them have defaults.
    """
    return lambda cpu: Operator(cpu, path)
