"""Peak memory: of this process on a CPU, of PyTorch's allocations on a GPU; and of it an engine's pages."""

import ctypes
import gc
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from dllm_engine.bench.passes import runner_of, scheduler_of
from dllm_engine.evaluation.answering import Memory
from dllm_engine.memory.plan import models_of
from dllm_engine.memory.start_up import available_memory
from dllm_engine.memory.weights import weights_of_models

if TYPE_CHECKING:
    from dllm_engine.llm import LLM


def restart_peak() -> int:
    """Forget the peak so far; return the memory held now, in bytes."""
    # Freed memory that the allocator keeps would hide what comes next.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if "CS_GNU_LIBC_VERSION" in os.confstr_names:
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def resident() -> int:
    """Bytes of memory that this process holds now on a CPU."""
    return int(psutil.Process().memory_info().rss)


def peak() -> int:
    """The most held since ``restart_peak``, in bytes."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    high_water = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert high_water
    return 1024 * int(high_water[1])


def available() -> int:
    """Bytes that new engines may take."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return available_memory()


class MemoryMeter:
    """Measures an engine of this process from now on; ``look`` after each of its steps."""

    def __init__(self, llm: "LLM") -> None:
        runner = runner_of(llm)
        config = runner.model_config
        models = models_of(config.hf_config, runner.options)
        self._weights = sum(weights_of_models(models, 1, config.dtype.itemsize, None))
        self._pool = scheduler_of(llm).pages
        self._bytes_per_page = 0 if runner.pages is None else runner.pages.memory[0].nbytes
        self._most_pages = 0
        self._before = restart_peak()

    def look(self) -> None:
        """Count the pages held now."""
        self._most_pages = max(self._most_pages, self._pool.num_allocated)

    def read(self) -> Memory:
        """Up to now."""
        most = peak()
        return Memory(self._weights, self._most_pages * self._bytes_per_page, max(0, most - self._before), most)


def touch_pages(llm: "LLM") -> None:
    """Take the memory of all pages at once: it is taken when it is first written to, and would count as that of the
    requests which happen to write first."""
    if (pages := runner_of(llm).pages) is not None:
        pages.memory.zero_()
