"""What figures were made on, and what the machine gives at best."""

import datetime
import platform
import re
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import vllm
from vllm.platforms import current_platform

from dllm_engine.version import __version__

T = TypeVar("T")
RATE_REPEATS = 7
_BYTES_COPIED = {"cpu": 1 << 27, "cuda": 1 << 31}
_SIDE = {"cpu": 1024, "cuda": 8192}


def provenance() -> dict[str, Any]:
    """Machine, versions, threads and date, for a file of figures."""
    current_platform.import_kernels()
    has_gpu, processor = torch.cuda.is_available(), platform.machine()
    if has_gpu:
        processor = torch.cuda.get_device_name()
    elif found := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
        processor = found[1]
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
        "clock": _clock_name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
_clock_name = "wall"


def use_clock(name: str) -> None:
    """Choose the seconds that this process counts: ``wall``, or ``processor``, its own on all threads together.

    Processor seconds hardly depend on what else runs on a shared machine.

    Raises:
        ValueError: processor seconds with a GPU, whose time they do not count.
    """
    if name == "processor" and torch.cuda.is_available():
        raise ValueError("clock='processor' does not count a GPU's time; use clock='wall'")
    global _clock_name
    _clock_name = name


def now() -> float:
    """Seconds of the chosen clock."""
    return CLOCKS[_clock_name]()


def synchronize() -> None:
    """Wait for a GPU to finish what it was given; nothing to wait for on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What one call returns, and its seconds to the end of what it started on a GPU."""
    synchronize()
    start = now()
    result = work()
    synchronize()
    return result, now() - start


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of one call, to the end of what it started on a GPU."""
    return timed(work)[1]


class MachineRates:
    """Rates that a large copy and a large matrix product reach here, measured again with every ``measure``."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._source = torch.ones(_BYTES_COPIED[device.type] // dtype.itemsize, device=device, dtype=dtype)
        self._target = torch.empty_like(self._source)
        self._square = torch.randn(_SIDE[device.type], _SIDE[device.type], device=device).to(dtype)
        self._copies: list[float] = []
        self._products: list[float] = []
        self.measure()  # warms up
        self._copies.clear()
        self._products.clear()

    def measure(self) -> None:
        for _ in range(RATE_REPEATS):
            self._copies.append(seconds_of(lambda: self._target.copy_(self._source)))
            self._products.append(seconds_of(lambda: self._square @ self._square))

    @property
    def copy_bytes_per_second(self) -> float:
        """Bytes read and written, at the median copy."""
        return 2 * self._source.numel() * self._source.element_size() / statistics.median(self._copies)

    @property
    def product_flops_per_second(self) -> float:
        """Multiplications and additions, at the median product."""
        return 2 * self._square.shape[0] ** 3 / statistics.median(self._products)

    def to_json(self) -> dict[str, Any]:
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "copy_bytes_per_second": self.copy_bytes_per_second,
            "copied_bytes": self._source.numel() * self._source.element_size(),
            "product_flops_per_second": self.product_flops_per_second,
            "product_side": self._square.shape[0],
            "median_of": len(self._copies),
        }
