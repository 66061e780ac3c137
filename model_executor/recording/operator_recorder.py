"""Recording where there are no CUDA graphs: a replay calls the same operators, without the Python between them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_engine.kernels._operator import kernel_of, operator_of
from dllm_engine.model_executor.recording.recorder import Recorder

MOST_BYTES = 128 << 20
"""What the results of a recording's operators may take. Python takes little of a step with more of them."""
_ALIGNMENT = 64
"""Of results, in bytes."""
_OF_RESULT = ("dtype", "layout", "device", "pin_memory")
_ALLOCATE = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")


class OperatorRecorder(Recorder):
    """For CPUs, where the operators of a small step take no longer than the Python that calls them. The results of all
    recordings' operators share one memory: no two recordings run at a time."""

    pads, outlives_weights = False, False

    def __init__(self) -> None:
        self.memory = torch.empty(MOST_BYTES, dtype=torch.uint8)  # what no recording touches takes no memory

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        run()  # what is computed once and kept must not lie in the shared memory
        with _Calls(self.memory) as recorded:
            result = run()
        if not recorded.fits:
            return run
        kept = result.clone()  # while other recordings run
        calls = [*recorded.calls, partial(kept.copy_, result)]

        def replay() -> torch.Tensor:
            for call in calls:
                call()
            return kept

        return replay


class _Calls(TorchDispatchMode):
    """Takes down the operators that are called, as long as their results fit into ``memory``, where they are put, and
    the host need not know any number."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []
        self.memory, self.num_bytes = memory, 0
        self.fits = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, operator = kwargs or {}, operator_of(func)
        # In inference mode, PyTorch's composite operators come here as well.
        parts = func.decompose if operator is None else operator.run if operator.composite else None
        if parts is not None:
            with self:
                result = parts(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not self.fits or func.is_view:
            return result
        results = list(result) if isinstance(result, tuple | list) else [] if result is None else [result]
        self.fits = not _needs_host(func, args, results)
        # An operator may write to its arguments and make results as well.
        is_made = [returned.alias_info is None for returned in func._schema.returns]
        if self.fits and any(is_made):
            of_results = is_made * len(results) if isinstance(result, list) else is_made
            results = [self._placed(x) if makes else x for x, makes in zip(results, of_results, strict=True)]
        if self.fits:
            self._take(func, args, kwargs, results, makes=any(is_made))
        return type(result)(results) if isinstance(result, tuple | list) else next(iter(results), None)

    def _placed(self, made: torch.Tensor) -> torch.Tensor:
        """A copy of a result in the memory, if it fits."""
        if not made.numel():
            return made
        needed = sum((size - 1) * stride for size, stride in zip(made.shape, made.stride(), strict=True)) + 1
        stop = self.num_bytes + needed * made.element_size()
        self.fits &= stop <= self.memory.numel()
        if not self.fits:
            return made
        part = self.memory[self.num_bytes : stop].view(made.dtype).as_strided(made.shape, made.stride())
        self.num_bytes = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return part.copy_(made)

    def _take(self, func: Any, args: Any, kwargs: dict[str, Any], results: list[torch.Tensor], makes: bool) -> None:
        kernel = kernel_of(func)
        if not makes:
            self.calls.append(partial(kernel, *args, **kwargs))
        elif func._schema.name in _ALLOCATE:
            pass
        elif (variant := _out_variant(func)) is not None:
            overload, names = variant
            given = {name: value for name, value in kwargs.items() if name not in _OF_RESULT}
            self.calls.append(partial(kernel_of(overload), *args, **given, **dict(zip(names, results, strict=True))))
        else:
            self.calls.append(partial(_call_into, results, partial(kernel, *args, **kwargs)))


def _needs_host(func: Any, args: Any, results: Sequence[object]) -> bool:
    """Whether the host waits for a number, the size of a result or another rank."""
    sizes_differ = torch.Tag.dynamic_output_shape in func.tags
    if func._schema.name == "aten::index":  # by numbers, or by a mask
        sizes_differ = any(index is not None and index.dtype == torch.bool for index in args[1])
    return sizes_differ or func.namespace == "c10d" or not all(isinstance(made, torch.Tensor) for made in results)


def _out_variant(func: Any) -> tuple[Any, list[str]] | None:
    """The overload that writes its results into tensors, and the names of these arguments."""
    packet, wanted = func.overloadpacket, _arguments(func)
    for overload in (getattr(packet, name) for name in packet.overloads()):
        out = [a.name for a in overload._schema.arguments if a.is_out]
        if len(out) == len(func._schema.returns) and _arguments(overload) == wanted:
            return overload, out
    return None


def _arguments(overload: Any) -> list[tuple[str, str]]:
    """Names and types of what an overload takes, without what tensors for its results tell it."""
    arguments = overload._schema.arguments
    return [(a.name, str(a.type)) for a in arguments if not a.is_out and a.name not in _OF_RESULT]


def _call_into(results: Sequence[torch.Tensor], call: Callable[[], Any]) -> None:
    again = call()
    for result, new in zip(results, (again,) if isinstance(again, torch.Tensor) else again, strict=True):
        if new.numel():
            result.copy_(new)
