"""A fake of CUDA graphs on a CPU: it records calls, refuses what a graph cannot hold,
and replays the calls.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves

from dllm_engine.kernels._operator import Operator
from dllm_engine.model_executor.model_runner import DiffusionModelRunner

ASKS = {
    "aten::_local_scalar_dense": "a number",
    "aten::item": "a number",
    "aten::resolve_conj": "numbers",  # of `tolist`
    "aten::nonzero": "a size",
    "aten::masked_select": "a size",
}
"""Operators that wait for the device, and for what."""
NOT_A_NUMBER = 1 << 40
GIVES = ("aten::lift_fresh", "aten::_to_copy")
"""Operators that bring numbers of the host."""


class ForbidDeviceSync(TorchDispatchMode):
    """Refuses what would wait for a device, but in the CPU bodies of our operators,
    which a device does not run.
    """

    def __enter__(self) -> "ForbidDeviceSync":
        call, mode = Operator.__call__, self

        def as_one(operator: Operator, *args: Any, **kwargs: Any) -> Any:
            if _get_current_dispatch_mode() is not mode:
                return call(operator, *args, **kwargs)
            with _disable_current_modes():
                return mode.call(partial(call, operator), args, kwargs)

        self.patch = patch.object(Operator, "__call__", as_one)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patch.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in ASKS:
            raise AssertionError(f"{name} asks the device for {ASKS[name]}")
        if name == "aten::index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            raise AssertionError("aten::index by a mask asks the device for a size")
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


class Capture(ForbidDeviceSync):
    """Records calls; refuses what a graph cannot hold, or not as what it was meant to
    be.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[
            tuple[Callable[..., Any], Any, dict[str, Any], list[torch.Tensor | None]]
        ] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in GIVES and (name != "aten::_to_copy" or "device" in (kwargs or {})):
            raise AssertionError(f"{name} may bring numbers of the host")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        given = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        # A view follows what it is a view of.
        made = [
            None if x is None or x.untyped_storage().data_ptr() in given else x
            for x in tree_leaves(result)
        ]
        self.calls.append((func, args, kwargs, made))
        return result

    def replay(self) -> None:
        """Do the same work again, into the same memory."""
        for func, args, kwargs, made in self.calls:
            for old, new in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
                if old is not None:
                    old.copy_(new)


class FakeGraphs:
    """``Record`` for a CPU, which counts."""

    def __init__(self, runner: DiffusionModelRunner | None = None) -> None:
        self.runner = runner
        self.num_recorded = self.num_replayed = 0
        self.last: Any = None

    def __call__(
        self, run: Callable[[], Any], *, launch_first: bool = True
    ) -> Callable[[], Any]:
        self.num_recorded += 1
        pages = None if self.runner is None else self.runner.rank.pages
        if launch_first:
            run()
        before = None if pages is None else pages.memory.clone()
        capture = Capture()
        with capture:
            result = run()
        if pages is not None and before is not None:
            pages.memory.copy_(before)  # what is recorded on a GPU does not run

        def replay() -> Any:
            self.num_replayed += 1
            with _disable_current_modes():  # nobody sees what a replay does
                for tensor in tree_leaves(self.last):  # graphs share their memory
                    if isinstance(tensor, torch.Tensor):
                        tensor.fill_(
                            torch.nan if tensor.is_floating_point() else NOT_A_NUMBER
                        )
                capture.replay()
            self.last = result
            return result

        return replay


def record_steps(
    runner: DiffusionModelRunner, monkeypatch: pytest.MonkeyPatch
) -> FakeGraphs:
    """Record steps until the test ends."""
    graphs = FakeGraphs(runner)
    monkeypatch.setattr(runner.denoiser, "graphs", None)
    runner.use_graphs(graphs)
    return graphs
