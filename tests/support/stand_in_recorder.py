"""Recording on a CPU as on a GPU: for tests of what is recorded and replayed there."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dllm_engine.model_executor.model_runner import DiffusionModelRunner
from dllm_engine.model_executor.recording.operator_recorder import OperatorRecorder

ASKS = {
    "aten::_local_scalar_dense": "a number",
    "aten::item": "a number",
    "aten::resolve_conj": "numbers",  # of `tolist`
    "aten::nonzero": "a size",
    "aten::masked_select": "a size",
}
"""Operators that wait for the device, and for what."""
GIVES = ("aten::lift_fresh", "aten::_to_copy")
"""Operators that bring numbers of the host."""


class ForbidDeviceSync(TorchDispatchMode):
    """Refuses what would wait for a device. Inside a kernel of this package it does not look."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ASKS:
            raise AssertionError(f"{name} asks the device for {ASKS[name]}")
        if name == "aten::index" and any(index is not None and index.dtype == torch.bool for index in args[1]):
            raise AssertionError("aten::index by a mask asks the device for a size")
        return func(*args, **(kwargs or {}))


class NothingOfTheHost(ForbidDeviceSync):
    """Refuses what a CUDA graph cannot hold, or not as what it was meant to be."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in GIVES and (name != "aten::_to_copy" or "device" in (kwargs or {})):
            raise AssertionError(f"{name} may bring numbers of the host")
        return super().__torch_dispatch__(func, types, args, kwargs)


class StandInRecorder(OperatorRecorder):
    """Refuses what a CUDA graph cannot hold, and counts."""

    pads = True

    def __init__(self) -> None:
        super().__init__()
        self.num_recorded = self.num_replayed = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.num_recorded += 1
        run()
        with NothingOfTheHost():
            again = super().__call__(run)
        assert again is not run, "not recorded"

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            with _disable_current_modes():  # what a replay does, nobody sees
                return again()

        return replay


def record_steps(runner: DiffusionModelRunner) -> StandInRecorder:
    """Let an engine's runner record its steps as it would on a GPU."""
    recorder = StandInRecorder()
    runner.record_with(recorder)
    return recorder
