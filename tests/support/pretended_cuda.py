"""A CUDA device for tests of what is done on one, where there is none: tensors on it lie in the memory of the CPU."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from dllm_engine.kernels._operator import Operator

CUDA = torch.device("cuda")
MAY_MIX = {torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.copy_}
"""What takes numbers of the CPU beside tensors of a device."""


class OnCuda(torch.Tensor):
    """A tensor on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class PretendedCuda(TorchFunctionMode):
    """While it is entered, ``device="cuda"`` works, and tensors there say so and refuse those of the CPU beside them,
    NumPy and operators of the CPU alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if func == torch.Tensor.is_cuda.__get__:
            return isinstance(args[0], OnCuda)
        if func == torch.Tensor.device.__get__:
            return CUDA if isinstance(args[0], OnCuda) else torch.device("cpu")
        named = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        on_cuda = any(isinstance(tensor, OnCuda) for tensor in tensors)
        if on_cuda and (func is torch.Tensor.numpy or "for_cpu" in str(func)):
            raise TypeError(f"{name} takes tensors of the CPU")
        if on_cuda and not named and func not in MAY_MIX:
            refuse_mixed(name, tensors)
        result = func(*tree_map(of_cpu, args), **tree_map(of_cpu, kwargs))
        if func is torch.Tensor.__iter__:
            result = list(result)
        if named:
            on_cuda = named[-1].type == "cuda"
        elif func is torch.Tensor.cpu:
            on_cuda = False
        placed = tree_map(lambda leaf: place(leaf, on_cuda), result)
        return iter(placed) if func is torch.Tensor.__iter__ else placed


def refuse_mixed(name: str, tensors: Iterable[torch.Tensor]) -> None:
    if any(tensor.dim() and not isinstance(tensor, OnCuda) for tensor in tensors):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")


def of_cpu(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def place(leaf: Any, on_cuda: bool) -> Any:
    """A result, which in-place functions took from their arguments."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, OnCuda) == on_cuda:
        return leaf
    return leaf.as_subclass(OnCuda if on_cuda else torch.Tensor)


@contextmanager
def pretended_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Enter it, with operators called directly: PyTorch's dispatcher would not know these tensors."""
    with monkeypatch.context() as patch, PretendedCuda():
        patch.setattr(Operator, "__call__", Operator.run)
        yield
