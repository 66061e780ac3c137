"""The machine that figures are made on, and the memory that this process holds of it."""

import ctypes
import datetime
import gc
import os
import platform
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
import vllm
from vllm.platforms import current_platform

from dllm_engine.memory.capacity import models_of
from dllm_engine.memory.weights import weight_bytes
from dllm_engine.version import __version__


def provenance() -> dict[str, Any]:
    """Machine, versions, threads and date, for a file of figures."""
    current_platform.import_kernels()
    has_gpu, processor = torch.cuda.is_available(), platform.machine()
    if has_gpu:
        processor = torch.cuda.get_device_name()
    elif name := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
        processor = name[1]
    driver = Path("/proc/driver/nvidia/version")
    return {
        "processor": processor,
        "compute_capability": torch.cuda.get_device_capability() if has_gpu else None,
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else None,
        "vllm": vllm.__version__,
        # Without vLLM's compiled operators, norms and gates are PyTorch's.
        "vllm_operators": hasattr(torch.ops._C, "rms_norm"),
        "dllm_engine": __version__,
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """``provenance`` in a line, for the head of a table."""
    return "{processor}, {threads} threads, torch {torch}, vLLM {vllm}, {date}".format(**machine)


class MemoryMeter:
    """Peaks of an engine's memory in this process from now on; ``look`` after each of its steps."""

    def __init__(self, runner: Any, pool: Any) -> None:
        models = models_of(runner.model_config.hf_config, runner.options)
        itemsize = runner.model_config.dtype.itemsize
        self._weight_bytes = sum(weight_bytes(model, 1, itemsize) for model in models)
        self._page_bytes = 0 if runner.pages is None else runner.pages.memory[0].nbytes
        self._pool, self._most_pages = pool, 0
        # Freed memory that the allocator keeps would hide what comes next.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        if "CS_GNU_LIBC_VERSION" in os.confstr_names:
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before = psutil.Process().memory_info().rss

    def look(self) -> None:
        """Count the pages held now."""
        self._most_pages = max(self._most_pages, self._pool.num_allocated)

    def read(self) -> dict[str, int]:
        """Bytes of weights and pages, and those held beyond the memory at first, by PyTorch's allocator on a GPU, else
        by this process."""
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
        else:
            high_water = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
            assert high_water
            peak = 1024 * int(high_water[1])
        return {
            "weight_bytes": self._weight_bytes,
            "page_bytes": self._most_pages * self._page_bytes,
            "working_bytes": max(0, peak - self._before),
        }
