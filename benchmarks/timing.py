"""Seconds of calls."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch

T = TypeVar("T")


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


@contextmanager
def watched(owner: Any, name: str) -> Iterator[list[float]]:
    """Seconds of each call of a function of ``owner``, while it is watched. On a GPU, it
    waits for the device before and after each.
    """
    original = getattr(owner, name)
    seconds: list[float] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        result, took = timed(lambda: original(*args, **kwargs))
        seconds.append(took)
        return result

    with mock.patch.object(owner, name, call):
        yield seconds
