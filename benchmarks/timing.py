"""Seconds of a call, and the rates that the machine gives at best."""

import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
RATE_REPEATS = 7
_BYTES_COPIED = {"cpu": 1 << 27, "cuda": 1 << 31}
_SIDE = {"cpu": 1024, "cuda": 8192}


def synchronize() -> None:
    """Wait for a GPU to finish its work; a CPU has none outstanding."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result of a call, and its seconds to the end of the work that it started on a
    GPU.
    """
    synchronize()
    start = time.perf_counter()
    result = work()
    synchronize()
    return result, time.perf_counter() - start


def seconds_of(work: Callable[[], object]) -> float:
    """The seconds alone."""
    return timed(work)[1]


class MachineRates:
    """Rates of a large copy and of a large matrix product, measured again with every
    ``measure``.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._source = torch.ones(
            _BYTES_COPIED[device.type] // dtype.itemsize, device=device, dtype=dtype
        )
        self._target = torch.empty_like(self._source)
        self._square = torch.randn(
            _SIDE[device.type], _SIDE[device.type], device=device
        ).to(dtype)
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
        return (
            2
            * self._source.numel()
            * self._source.element_size()
            / statistics.median(self._copies)
        )

    @property
    def product_flops_per_second(self) -> float:
        """Multiplications and additions, at the median product."""
        return 2 * self._square.shape[0] ** 3 / statistics.median(self._products)

    def to_json(self) -> dict[str, Any]:
        rates = {
            name: getattr(self, name)
            for name in ("copy_bytes_per_second", "product_flops_per_second")
        }
        return rates | {"median_of": len(self._copies)}
