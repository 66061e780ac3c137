"""Operators: functions of tensors with one body for CPUs, and one that launches Triton
kernels on CUDA devices.
"""

import pkgutil
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Operator(Generic[_P, _R]):
    """Decorator of an operator's body for CPUs. A call runs the body for the device of
    the first argument.
    """

    def __init__(self, cpu: Callable[_P, _R]) -> None:
        self.__doc__ = cpu.__doc__
        self.name = cpu.__name__.lstrip("_")
        self.cpu = cpu

    @cached_property
    def triton(self) -> Callable[..., _R]:
        """The body for CUDA devices. It has the same name and arguments, in the module
        of the same name in ``triton/``. It is imported on first use, because a CPU
        installation may lack Triton."""
        module = self.cpu.__module__.replace(".kernels.", ".kernels.triton.")
        try:
            launch: Callable[..., _R] = pkgutil.resolve_name(f"{module}:{self.name}")
        except ModuleNotFoundError as error:
            raise ImportError(
                "the CUDA kernels need Triton: pip install triton"
            ) from error
        return launch

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        first: Any = args[0]
        return (self.triton if first.is_cuda else self.cpu)(*args, **kwargs)
