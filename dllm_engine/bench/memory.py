"""Peak memory: of this process on a CPU, of PyTorch's allocations on a GPU."""

import ctypes
import gc
import re
from pathlib import Path

import psutil
import torch

MIB = 1 << 20


def restart_peak() -> int:
    """Forget the peak so far; return the memory held now, in bytes."""
    # Freed memory that the allocator keeps would hide what comes next.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
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
    return int(psutil.virtual_memory().available)
