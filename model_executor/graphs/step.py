"""Graphs of one engine."""

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
import torch

from dllm_engine.model_executor.batch_tables import padded_width
from dllm_engine.model_executor.candidates import BatchCandidates
from dllm_engine.model_executor.graphs.filling import FillingGraph, FillingSize
from dllm_engine.model_executor.graphs.forward import ForwardGraph, ForwardSize, LayoutGraph
from dllm_engine.model_executor.graphs.recording import GraphCache, Record, padded, worth_padding
from dllm_engine.model_executor.passes.base import DensePass, LayerPass
from dllm_engine.model_executor.passes.paged import PagedPass
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.unmasking.filling import Filled, FillWork
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics

if TYPE_CHECKING:
    from dllm_engine.model_executor.model_runner import DiffusionModelRunner


class StepGraphs:
    """The graphs of one engine, which run the parts of steps that they can."""

    def __init__(self, runner: "DiffusionModelRunner", record: Record) -> None:
        self.record, self.model, self.predictor, self.pages = record, runner.model, runner.predictor, runner.pages
        self.store, self.end_tokens = runner.store, runner.denoiser.end_tokens
        self.dtype = runner.model_config.dtype
        """Of hidden states."""
        self.max_pages = padded_width(-(-runner.model_config.max_model_len // runner.options.page_size))
        """The most pages of a request in a layer."""
        self.max_requests = runner.vllm_config.scheduler_config.max_num_seqs
        """The most requests of a batch."""
        self.launches_before = 0
        """Times that work of a kind is launched before it is recorded."""
        self._begin()

    def _begin(self) -> None:
        self.tokens = self.store.tokens
        self.forwards: GraphCache[ForwardSize, ForwardGraph] = GraphCache()
        self.layouts: GraphCache[Hashable, LayoutGraph] = GraphCache()
        self.fillings: GraphCache[FillingSize, FillingGraph] = GraphCache()

    def _forget_outdated(self) -> None:
        """Graphs read and write the canvases where they were recorded."""
        if self.store.tokens is not self.tokens:
            self._begin()

    def problem(self, max_error: float) -> str | None:
        """Difference between a graph and the same work launched, on made-up numbers; None: none.

        For an idle engine: it writes to the first page of the pool and to the canvases. ``max_error`` is that of hidden
        states, over the largest of them.
        """
        if self.pages is not None:
            self.pages.keys[1].normal_()
            self.pages.values[1].normal_()
        for (num_requests, num_rows, *_), forward in self.forwards.graphs.items():
            used = forward.fill_up(page=1)
            launched = forward.launch()[:used].float()
            error = float((forward.replay()[:used].float() - launched).abs().max() / launched.abs().max())
            if not error <= max_error:
                return f"{num_requests} requests of {num_rows} rows are off by {error:.1e} when they are replayed"
        for size, filling in self.fillings.graphs.items():
            filling.fill_up()
            expected = filling.launch()[0].clone()
            filling.fill_up()
            if not torch.equal(filling.replay()[0], expected):
                return f"{size.num_candidates} candidates are filled otherwise when that is replayed"
        return None

    def record_forward(self, size: ForwardSize) -> ForwardGraph | None:
        """The graph of a size, as ``GraphCache.get`` gives it."""
        return self.forwards.get(size, lambda: ForwardGraph(self, size), self.launches_before)

    def record_filling(self, size: FillingSize) -> FillingGraph | None:
        """The graph of a size, as ``GraphCache.get`` gives it."""
        return self.fillings.get(size, lambda: FillingGraph(self, size), self.launches_before)

    def forward(self, batch: StepBatch, layer_pass: LayerPass) -> torch.Tensor | None:
        """Hidden states ``[num_rows, hidden_size]``, to be read before the next step; None: launch it."""
        self._forget_outdated()
        if isinstance(layer_pass, PagedPass | DensePass):
            size = ForwardSize.of(batch, layer_pass)
            forward = None if size is None else self.record_forward(size)
            return None if forward is None else forward(batch, layer_pass)
        layout = layer_pass.graph_layout()
        if layout is None:
            return None
        before = max(1, self.launches_before)
        graph = self.layouts.get(layout, lambda: LayoutGraph(self, batch, layer_pass), before)
        return None if graph is None else graph(batch, layer_pass)

    def fill(
        self, hidden: torch.Tensor, group: BatchCandidates, work: FillWork, numbers: np.ndarray
    ) -> tuple[Filled, TokenStatistics] | None:
        """``fill`` of a group, whose rows are among those of ``hidden``; None: launch it. The statistics last until the
        next replay."""
        specs = [group.batch.canvases[index].spec for index in group.members]
        num_candidates, delayed = group.positions.numel(), sum(spec.gen_length for spec in specs if spec.delay_eos)
        rows, width, positions = padded(num_candidates), padded(group.width), padded(delayed)
        if rows is None or width is None or positions is None or not worth_padding(num_candidates, rows):
            return None
        if self.predictor.tp_group.world_size > 1 or group.biased or any(spec.guidance is not None for spec in specs):
            return None
        self._forget_outdated()
        size = FillingSize(rows, width, positions if delayed else None, group.certainty is not None, work)
        graph = self.record_filling(size)
        return None if graph is None else graph(hidden, group, numbers)
