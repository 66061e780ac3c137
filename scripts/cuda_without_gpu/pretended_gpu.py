"""A GPU that vLLM believes in: its CUDA platform and its CUDA worker run, and tensors lie in the memory of the CPU.

PyTorch runs nothing on a GPU without its driver, so the model runner gets the CPU as its device, and the GPU's memory
is a number that is kept here.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton.backends
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm import platforms

from .compiling_driver import TOTAL_MEMORY, CompilingDriver

WEIGHTS, ACTIVATIONS = 16 << 30, 2 << 30
"""What loading a model takes of the GPU's memory, and what a pass takes for its time, whatever the model."""
_library = torch.library.Library("_C", "FRAGMENT")


class Memory:
    """What is held of the GPU's memory, the most that was, and what vLLM's allocator for sleep gave out.

    It stands in for that allocator too: what is asleep and not backed up holds no numbers any more.
    """

    def __init__(self) -> None:
        self.held = self.most = 0
        self.pools: dict[str, list[torch.UntypedStorage]] = {}

    def take(self, number: int) -> None:
        self.held += number
        self.most = max(self.held, self.most)

    def reset_most(self) -> None:
        self.most = self.held

    def get_current_usage(self) -> int:
        return sum(map(len, self.pools.values()))

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        with _Allocations(self.pools.setdefault(tag, [])):
            yield

    def sleep(self, offload_tags: Iterable[str]) -> None:
        for tag in self.pools.keys() - set(offload_tags):
            for storage in self.pools[tag]:
                # NaN in every type of floats, and −1 of integers.
                torch.tensor([], dtype=torch.uint8).set_(storage).fill_(0xFF)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Addresses stay the same."""


class _Allocations(TorchDispatchMode):
    """Keeps the memory that operators give out while it is entered."""

    def __init__(self, kept: list[torch.UntypedStorage]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self.kept += [storage for storage in _storages(result) if storage.data_ptr() not in given]
        return result


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if not tensor.is_meta]


def pretend() -> Memory:
    """Give this process a GPU, before it imports what asks vLLM for its platform; returns the GPU's memory."""
    # What is linked with the driver finds none of its functions: they are looked up when they are called, and none is.
    sys.setdlopenflags(os.RTLD_LAZY)
    CompilingDriver(90).install()
    triton.backends.backends["nvidia"].driver.is_active = lambda: True
    memory = Memory()
    answers: dict[str, Callable[..., Any]] = {
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_memory_info": lambda device=None: (TOTAL_MEMORY - memory.held, TOTAL_MEMORY),
        "memory_reserved": lambda device=None: memory.held,
        "memory_stats": lambda device=None: {
            "allocated_bytes.all.peak": memory.most,
            "allocated_bytes.all.current": memory.held,
        },
        "reset_peak_memory_stats": lambda device=None: memory.reset_most(),
        "set_device_index": lambda device: None,
        "synchronize": lambda device=None: None,
    }
    for name, answer in answers.items():
        patch.object(torch.accelerator, name, answer).start()
    patch.object(torch.cuda.memory, "get_allocator_backend", lambda: "none").start()
    _take_the_platform()
    _take_the_operators()
    _take_the_worker(memory)
    return memory


def _take_the_platform() -> None:
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    class Platform(NonNvmlCudaPlatform):
        dist_backend = "gloo"  # NCCL's needs a GPU

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

    platforms._current_platform = Platform()


def _take_the_operators() -> None:
    """Give those of vLLM's that a model calls an implementation for the CPU."""
    platforms.current_platform.import_kernels()

    def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
        out.copy_(F.rms_norm(x, weight.shape, weight, epsilon))

    def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
        rms_norm(x, residual.add_(x), weight, epsilon)

    for operator in (rms_norm, fused_add_rms_norm):
        _library.impl(operator.__name__, operator, "CPU")


def _take_the_worker(memory: Memory) -> None:
    from vllm.device_allocator.cumem import CuMemAllocator

    from dllm_engine.model_executor.model_runner import DiffusionModelRunner
    from dllm_engine.model_executor.workers.gpu import DiffusionGPUWorker

    class Runner(DiffusionModelRunner):
        def load_model(self, *, load_dummy_weights: bool = False) -> None:
            super().load_model(load_dummy_weights=load_dummy_weights)
            memory.take(WEIGHTS)

        def profile_run(self, randomize_inputs: bool = False) -> None:
            super().profile_run(randomize_inputs)
            memory.take(ACTIVATIONS)
            memory.take(-ACTIVATIONS)

        def shutdown(self) -> None:
            super().shutdown()
            memory.held = 0
            memory.pools.clear()

    def make_runner(worker: DiffusionGPUWorker) -> Runner:
        worker.device = torch.device("cpu")
        worker.vllm_config.load_config.device = "cpu"
        return Runner(worker.vllm_config, worker.device)

    patch.object(DiffusionGPUWorker, "_make_model_runner", make_runner).start()
    patch.object(CuMemAllocator, "get_instance", lambda: memory).start()
