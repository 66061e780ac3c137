"""Use of freed memory by glibc: it goes back to the system while weights are loaded, and is kept for steps."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_RETURNED_BYTES = 128 << 10  # glibc's own default
_KEPT_BYTES = 512 << 20


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Return freed memory to the system within the block, and have glibc keep up to 512 MiB of it afterwards.

    Packing weights frees as many bytes as the model has. In steps, an allocator that returned each activation would
    take it back page by page: at 1,024 rows of 512 floats and 8 layers that is 19,000 page faults and a tenth of the
    step's time. Another allocator's `mallopt` does nothing.
    """
    _set_thresholds(_RETURNED_BYTES)
    try:
        yield
    finally:
        return_freed_memory()
        _set_thresholds(_KEPT_BYTES)


def return_freed_memory() -> None:
    """Once, whatever is free now."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _set_thresholds(size: int) -> None:
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, size)
        libc.mallopt(_M_TRIM_THRESHOLD, size)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
