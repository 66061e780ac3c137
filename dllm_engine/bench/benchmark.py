"""A benchmark run: every cell of a model, in rounds over the cells so that a drift of the machine meets all alike."""

import gc
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from dllm_engine.bench.cells import (
    PLAIN,
    Cell,
    Sample,
    cell_figures,
    measure_floors,
    run_engine,
    run_plain,
)
from dllm_engine.bench.machine import MachineRates
from dllm_engine.bench.memory import available, touch_pages
from dllm_engine.bench.passes import runner_of
from dllm_engine.bench.plain import PlainDecoder, check_baseline
from dllm_engine.bench.subject import BenchSettings, Subject

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

PACKED_COPIES = 2
"""A CPU engine may hold its weights twice while it loads: as they are, and packed for its matrix products."""
MEMORY_SHARE = 0.5
"""Of what is available, for engines that run side by side."""


class Benchmark:
    """Measures one model; raises ``ValueError`` at once for what cannot be measured."""

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = s = settings
        self._running: dict[str, LLM] = {}
        """Engines that have not been stopped: one that is dropped takes vLLM's process groups from all others."""
        self.subject = Subject(s)
        for unmasking, prompt in itertools.product(s.unmaskings, s.prompts):
            for method in s.methods:
                self.subject.spec(method, unmasking, prompt)
            if s.baseline and unmasking.has_baseline:
                check_baseline(self.subject.spec("none", unmasking, prompt))

    def groups(self) -> list[tuple[str, ...]]:
        """Methods whose engines run side by side: all, where memory allows; on a GPU each alone."""
        s, copies = self.settings, PACKED_COPIES
        pools = sum(self.subject.pool_bytes(method) for method in s.methods)
        needed = (len(s.methods) * copies + 1) * self.subject.weight_bytes + pools
        if torch.cuda.is_available() or needed > MEMORY_SHARE * available():
            return [(method,) for method in s.methods]
        return [s.methods]

    def run(self) -> dict[str, Any]:
        """The figures, ready for JSON."""
        s, subject = self.settings, self.subject
        groups = self.groups()
        rates: MachineRates | None = None
        plain: PlainDecoder | None = None
        cells: list[dict[str, Any]] = []
        with tqdm(total=len(groups) * (s.repeats + 1), desc=s.model, unit="round", leave=False) as bar:
            for number, methods in enumerate(groups):
                self.stop()
                device, dtype = self._start(methods)
                if rates is None:
                    rates = MachineRates(device, dtype)
                if plain is None and s.baseline:
                    plain = subject.plain(device)
                cells += self._measure(number, plain, rates, bar)
        assert rates is not None
        return {
            "model": s.model,
            "weights": "random" if subject.has_random_weights else "checkpoint",
            "shape": asdict(subject.shape),
            "dtype": subject.dtype,
            "engine_args": s.engine_args,
            "cache_options": {method: subject.options(method).cache.model_dump() for method in s.methods},
            "unmasking": {unmasking.text: unmasking.options for unmasking in s.unmaskings},
            "response": s.response,
            "block_length": subject.spec("none", s.unmaskings[0], s.prompts[0]).block_length,
            "repeats": s.repeats,
            "seed": s.seed,
            "groups": [list(methods) for methods in groups],
            "rates": rates.to_json(),
            "cells": cells,
        }

    def _start(self, methods: Sequence[str]) -> tuple[torch.device, torch.dtype]:
        """Start the engines of a group; returns where and in what type they compute. Only ``_running`` may hold them,
        so that ``stop`` frees their memory."""
        for method in methods:
            self._running[method] = self.subject.start(method)
            touch_pages(self._running[method])
            runner = runner_of(self._running[method])
        return runner.device, runner.model_config.dtype

    def _cells(self, methods: Sequence[str]) -> Iterator[Cell]:
        s = self.settings
        for prompt in s.prompts:
            for unmasking in s.unmaskings:
                if s.baseline and unmasking.has_baseline:
                    yield Cell(PLAIN, unmasking, min(s.batches), prompt)
                for batch in s.batches:
                    for method in methods:
                        yield Cell(method, unmasking, batch, prompt)

    def _measure(self, group: int, plain: PlainDecoder | None, rates: MachineRates, bar: Any) -> list[dict[str, Any]]:
        """Round 0 warms up."""
        subject, engines = self.subject, self._running
        tokenizer = None if subject.has_random_weights else next(iter(engines.values())).get_tokenizer()
        prompts = {length: subject.prompts(length, tokenizer) for length in self.settings.prompts}
        samples: dict[Cell, list[Sample]] = {cell: [] for cell in self._cells(list(engines))}
        for number in range(self.settings.repeats + 1):
            rates.measure()
            for cell, made in samples.items():
                asked, ends = prompts[cell.prompt][: cell.batch], subject.end_tokens(cell.unmasking)
                if cell.method == PLAIN:
                    assert plain is not None
                    spec, keeps = subject.spec("none", cell.unmasking, cell.prompt), subject.family.keeps_blocks
                    sample = run_plain(plain, asked if number else asked[:1], spec, ends, keeps_blocks=keeps)
                else:
                    sample = run_engine(engines[cell.method], asked, subject.params(cell.unmasking), ends)
                    if number:
                        measure_floors(engines[cell.method], sample)
                if number:
                    made.append(sample)
            bar.update()
        random = subject.has_random_weights
        return [cell_figures(cell, group, made, has_random_weights=random) for cell, made in samples.items()]

    def stop(self) -> None:
        """End the engines before others start: a device holds one group at a time."""
        while self._running:
            self._running.popitem()[1].llm_engine.engine_core.shutdown()
        gc.collect()
        torch.cuda.empty_cache()  # vLLM measures what the device has free; without a GPU this does nothing
