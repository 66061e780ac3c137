"""PyTorch operators with a kernel per device, at the price of a call.

``torch.library.custom_op`` wraps every kernel in Python that serves training (autograd, checks of aliasing). Even
without it, PyTorch's dispatcher converts every argument to C++ and back. Together this costs 10 to 30 µs a call, more
than a small kernel takes, several times per layer, so plain tensors go straight to their device's kernel. What
``torch.compile``, fake tensors and dispatch modes rely on is registered here as well, and what they see goes through
the dispatcher: schema, mutated arguments and fake kernel.
"""

from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

_P = ParamSpec("_P")
_R = TypeVar("_R")
_library = torch.library.Library("dllm", "FRAGMENT")

_operators: dict[object, "Operator[Any, Any]"] = {}
plain_on_cuda: set[str] = set()
"""Names of operators, ours and vLLM's, whose plain kernel CUDA tensors get too, because their own failed its check.
Ours wait for the device there, so no CUDA graph can record them."""


class Operator(Generic[_P, _R]):
    """``torch.ops.dllm.NAME``, called like the function that it was made from."""

    def __init__(
        self,
        kernel: Callable[_P, _R],
        name: str,
        mutates: tuple[str, ...],
        triton: str | None,
        composite: bool,
    ) -> None:
        self.__doc__, self.name, self.composite = kernel.__doc__, name, composite
        self._check: Callable[_P, None] | None = None
        self.kernel, self._triton = kernel, triton
        _library.define(name + torch.library.infer_schema(kernel, mutates_args=mutates))
        self._overload = getattr(torch.ops.dllm, name).default
        _library.impl(name, self.run, "CompositeExplicitAutograd")
        _operators[self._overload] = self
        if mutates:
            torch.library.register_fake(self._overload, lambda *args: None, lib=_library)

    @cached_property
    def triton_kernel(self) -> Callable[..., _R] | None:
        """The function that launches the CUDA kernel, imported on first use: a CPU installation may lack Triton."""
        if self._triton is None:
            return None
        try:
            module = import_module(f"dllm_engine.kernels.triton.{self._triton}")
        except ModuleNotFoundError as error:
            raise ImportError("the CUDA kernels need Triton: pip install triton") from error
        launch: Callable[..., _R] = getattr(module, self.name)
        return launch

    def run(self, *args: Any, **kwargs: Any) -> _R:
        """Run the kernel of the first argument's device, or the plain one for ``plain_on_cuda``."""
        if self._triton and args[0].is_cuda and self.name not in plain_on_cuda:
            assert self.triton_kernel is not None
            return self.triton_kernel(*args, **kwargs)
        return self.kernel(*args, **kwargs)

    def register_check(self, check: Callable[_P, None]) -> Callable[_P, None]:
        """Decorates a function that is called before any kernel and raises an error for arguments that do not fit."""
        self._check = check
        return check

    def register_fake(self, kernel: Callable[..., _R]) -> Callable[..., _R]:
        """Decorates the kernel for fake tensors, which makes results of the right shapes and types."""
        torch.library.register_fake(self._overload, kernel, lib=_library)
        return kernel

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self._check is not None:
            self._check(*args, **kwargs)
        if torch.compiler.is_compiling() or _get_current_dispatch_mode() or type(args[0]) is not torch.Tensor:
            result: _R = self._overload(*args, **kwargs)
            return result
        return self.run(*args, **kwargs)


def operator(
    name: str, *, mutates: tuple[str, ...] = (), triton: str | None = None, composite: bool = False
) -> Callable[[Callable[_P, _R]], Operator[_P, _R]]:
    """Make an operator from a function of tensors and numbers, which becomes its kernel for CPUs.

    Args:
        mutates: names of the arguments that the operator writes to. Such an operator returns None.
        triton: the module in ``triton/`` where a function of the operator's name launches the CUDA kernel. It takes
            the same arguments; those beyond them have defaults. Without one, the CPU's kernel runs on all devices.
        composite: whether the CPU's kernel only calls other operators and never depends on a number in a tensor, so
            that recording these comes to the same.
    """

    def of_kernel(kernel: Callable[_P, _R]) -> Operator[_P, _R]:
        return Operator(kernel, name, mutates, triton, composite)

    return of_kernel


def operator_of(overload: object) -> Operator[Any, Any] | None:
    """Ours that an overload of ``torch.ops`` belongs to."""
    return _operators.get(overload)


def kernel_of(overload: Callable[..., Any]) -> Callable[..., Any]:
    """What calling an overload of ``torch.ops`` comes to: of one of ours without the dispatcher, of another without the
    method around it."""
    operator = operator_of(overload)
    return getattr(overload, "_op", overload) if operator is None else operator.run
