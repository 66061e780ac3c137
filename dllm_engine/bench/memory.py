"""Peak memory: of this process on a CPU, of PyTorch's allocations on a GPU."""

import ctypes
import gc
from pathlib import Path

import torch

MIB = 1 << 20


def memory_of(field: str) -> int:
    """A memory field of this process (``VmRSS``, ``VmHWM``), in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def restart_peak() -> int:
    """Forget the peak so far; returns the memory held now, in bytes."""
    # Freed memory that the allocator keeps would hide what comes next.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory_of("VmRSS")


def peak() -> int:
    """The most held since ``restart_peak``, in bytes."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else memory_of("VmHWM")


def available() -> int:
    """Bytes that new engines may take."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return int(free)
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024
