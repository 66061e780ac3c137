"""PyTorch operators with a kernel per device, at the price of a plain dispatch.

``torch.library.custom_op`` wraps every kernel in Python that serves training (autograd, checks of aliasing): 5 to 10 µs
a call, more than a small kernel takes, several times per layer. Inference needs none of it. What ``torch.compile``,
fake tensors and dispatch modes go by is registered here as well: schema, mutated arguments and fake kernel.
"""

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
_library = torch.library.Library("dllm", "FRAGMENT")


class Operator(Generic[_P, _R]):
    """``torch.ops.dllm.NAME``, called as the function that it was made of."""

    def __init__(self, kernel: Callable[_P, _R], name: str, mutates: tuple[str, ...]) -> None:
        """``kernel``: for a CPU, and for whatever other device none is registered for."""
        self.__doc__, self.name = kernel.__doc__, name
        self.kernels: dict[str, Callable[..., _R]] = {}
        """By dispatch key."""
        _library.define(name + torch.library.infer_schema(kernel, mutates_args=mutates))
        self._overload = getattr(torch.ops.dllm, name).default
        self.register_kernel("CompositeExplicitAutograd")(kernel)

    def register_kernel(self, dispatch_key: str) -> Callable[[_Kernel], _Kernel]:
        """Decorates the kernel for ``CUDA``, say. Arguments beyond the operator's have defaults."""

        def of_key(kernel: _Kernel) -> _Kernel:
            _library.impl(self.name, kernel, dispatch_key)
            self.kernels[dispatch_key] = kernel
            return kernel

        return of_key

    def register_fake(self, kernel: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorates the one for fake tensors, which makes results of the right shapes and types."""
        torch.library.register_fake(self._overload, kernel, lib=_library)
        return kernel

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        result: _R = self._overload(*args, **kwargs)
        return result


def operator(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable[_P, _R]], Operator[_P, _R]]:
    """Makes an operator of a function of tensors and numbers; ``mutates`` names the arguments that it writes to."""

    def of_kernel(kernel: Callable[_P, _R]) -> Operator[_P, _R]:
        return Operator(kernel, name, mutates)

    return of_kernel
