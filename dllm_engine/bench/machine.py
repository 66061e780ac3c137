"""What figures were made on, and what the machine gives at best."""

import datetime
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform

from dllm_engine.version import __version__

RATE_REPEATS = 7
_BYTES_COPIED = {"cpu": 1 << 27, "cuda": 1 << 31}
_SIDE = {"cpu": 1024, "cuda": 8192}


def processor() -> str:
    """The name of the GPU, where there is one, or of the CPU."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())


def driver() -> str | None:
    """What NVIDIA's driver says of itself; None where there is none, or it does not say."""
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0] if file.is_file() else None


def triton_version() -> str | None:
    """None where Triton is not installed."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def has_vllm_operators() -> bool:
    """Whether vLLM's compiled operators can be had. Without them norms and gates are PyTorch's."""
    current_platform.import_kernels()
    return hasattr(torch.ops._C, "rms_norm")


def provenance() -> dict[str, Any]:
    """Machine, versions, threads and date, for a file of figures."""
    return {
        "processor": processor(),
        "compute_capability": torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
        "driver": driver(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "vllm": vllm.__version__,
        "vllm_operators": has_vllm_operators(),
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


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of one call, to the end of what it started on a GPU."""
    synchronize()
    start = now()
    work()
    synchronize()
    return now() - start


class MachineRates:
    """Rates that a large copy and a large matrix product reach here, measured again with every ``measure``."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._source = torch.ones(_BYTES_COPIED[device.type] // dtype.itemsize, device=device, dtype=dtype)
        self._target = torch.empty_like(self._source)
        self._square = torch.randn(_SIDE[device.type], _SIDE[device.type], device=device).to(dtype)
        self._copies: list[float] = []
        self._products: list[float] = []
        for work in (self._copy, self._multiply):
            work()

    def _copy(self) -> object:
        return self._target.copy_(self._source)

    def _multiply(self) -> object:
        return self._square @ self._square

    def measure(self) -> None:
        for _ in range(RATE_REPEATS):
            self._copies.append(seconds_of(self._copy))
            self._products.append(seconds_of(self._multiply))

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
