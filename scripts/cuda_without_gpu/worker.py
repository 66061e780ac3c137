"""Runs vLLM's CUDA worker around our model runner, from its start to its end, and compares answers with stored ones."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .compiling_driver import TOTAL_MEMORY
from .pretended_gpu import ACTIVATIONS, WEIGHTS, Memory, pretend

if TYPE_CHECKING:
    from dllm_engine.check.checks import Check

METHOD = "sparse"
"""Of the engine whose life is followed: it retains less than all, so its pages matter."""
POOL = 256 << 20
"""What vLLM is to have left for pages."""


class Life:
    """One engine. Each method that ``steps`` names is a check, and comes after those before it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.steps: dict[str, Callable[[], None]] = {
            "starts on vLLM's CUDA worker": self.start,
            "sizes the page pool from what profiling found": self.size,
            "answers after the warm-up": self.answer,
            "sleeps at level 1 and wakes": self.sleep_lightly,
            "sleeps at level 2, wakes and reads its weights again": self.sleep_deeply,
            "shuts down": self.shut_down,
        }

    def start(self) -> None:
        """With defaults where ``dllm check`` has settings for many small engines."""
        from vllm.v1.worker.gpu_worker import Worker

        from dllm_engine.check.answers import SETTINGS
        from dllm_engine.llm import LLM

        share = (WEIGHTS + ACTIVATIONS + POOL) / TOTAL_MEMORY
        changed = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": share, "enable_sleep_mode": True}
        self.llm = LLM("demo", cache_method=METHOD, cuda_graphs=False, **SETTINGS | changed)
        self.core: Any = self.llm.llm_engine.engine_core
        self.worker = self.core.engine_core.model_executor.driver_worker.worker
        expect("the worker is vLLM's", isinstance(self.worker, Worker), True)

    def size(self) -> None:
        expect("bytes for pages", self.worker.available_kv_cache_memory_bytes, POOL)
        pages = self.worker.model_runner.pages.memory
        expect("pages that would fit beside them", (POOL - pages.nbytes) // pages[0].nbytes, 0)

    def answer(self) -> None:
        from dllm_engine.check.answers import ANSWERS, answers_of

        stored = json.loads(ANSWERS.read_text(encoding="utf-8"))[METHOD]
        for answer, expected in zip(answers_of(self.llm), stored, strict=True):
            expect("tokens", answer["tokens"], expected["tokens"])

    def sleep_lightly(self) -> None:
        self.llm.sleep(1)
        expect("pages are lost", self._is_lost(self.worker.model_runner.pages.memory), True)
        self.llm.wake_up()
        self.answer()

    def sleep_deeply(self) -> None:
        self.llm.sleep(2)
        weights = list(self.worker.model_runner.model.parameters())
        expect("weights that are lost", sum(map(self._is_lost, weights)), len(weights))
        self.llm.wake_up()
        self.llm.collective_rpc("reload_weights")
        self.answer()

    def shut_down(self) -> None:
        self.core.shutdown()

    @staticmethod
    def _is_lost(numbers: torch.Tensor) -> bool:
        return bool(numbers.isnan().all())


def expect(what: str, found: object, wanted: object) -> None:
    """Raises ``ValueError`` if they differ."""
    if found != wanted:
        raise ValueError(f"{what}: {found}, not {wanted}")


def checks(memory: Memory) -> "Iterator[Check]":
    """The life of one engine, then answers of every cache method."""
    from dllm_engine.check.answers import answer_checks
    from dllm_engine.check.checks import Check

    def run(step: Callable[[], None]) -> tuple[float, float]:
        step()
        return 0.0, 0.0

    for title, step in Life(memory).steps.items():
        yield Check("worker", title, partial(run, step))
    yield from answer_checks(torch.device("cpu"))


def main(results: int) -> None:
    """Writes a line of JSON for each check to the file descriptor ``results``."""
    memory = pretend()
    from dllm_engine.check.checks import run_checks

    with os.fdopen(results, "w", buffering=1) as lines:
        for outcome in run_checks(checks(memory)):
            print(json.dumps(asdict(outcome)), file=lines)


if __name__ == "__main__":
    main(int(sys.argv[1]))
