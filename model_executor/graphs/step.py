"""Graphs of one rank: recorded filling in of tokens, and the caches of all graphs."""

from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm_engine.model_executor.candidates import ONLY_OBSERVED, BatchCandidates
from dllm_engine.model_executor.canvas_store import SPARE
from dllm_engine.model_executor.graphs.forward import (
    ForwardGraph,
    ForwardSize,
    LayoutGraph,
)
from dllm_engine.model_executor.graphs.recording import (
    HOST_BOUND_ROWS,
    GraphCache,
    Record,
    padded,
    worth_padding,
)
from dllm_engine.model_executor.passes.base import DensePass, LayerPass, Results
from dllm_engine.model_executor.passes.paged import PagedPass
from dllm_engine.model_executor.rank import Rank
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.filling import (
    Filled,
    FillInputs,
    FillWork,
    Number,
    RequestNumbers,
    fill,
)
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics, required


class FillingSize(NamedTuple):
    """Key of a graph that fills in tokens."""

    num_candidates: int
    width: int
    """Candidates and positions of one request."""
    num_positions: int | None
    """Number of positions of the responses, if a request delays end tokens; else None.
    """
    has_certainty: bool
    work: FillWork


class FillingGraph:
    """Recorded filling in of candidates: the head, statistics of its logits, the
    choice, and the canvas. Padding candidates behind those of the batch belong to no
    request."""

    def __init__(self, rank: Rank, record: Record, size: FillingSize) -> None:
        store = rank.store
        device = rank.device
        shape = size.num_candidates, rank.model.config.hidden_size
        self.hidden = torch.zeros(shape, dtype=rank.dtype, device=device)
        # Padding belongs to one more request.
        self.filler = torch.tensor(
            [rank.max_num_seqs, 0, 0, SPARE, 0, ONLY_OBSERVED], device=device
        )[:, None]
        self.no_position = self.filler[[0, 3]]
        self.inputs = FillInputs(
            self.filler.repeat(1, size.num_candidates),
            RequestNumbers(
                torch.zeros(
                    len(Number), rank.max_num_seqs + 1, dtype=torch.int64, device=device
                )
            ),
            torch.ones(size.num_candidates, device=device)
            if size.has_certainty
            else None,
            None
            if size.num_positions is None
            else self.no_position.repeat(1, size.num_positions),
            size.width,
        )
        self.store = store
        self.holds: BatchCandidates | None = None
        self.numbers: RequestNumbers | None = None
        self.launch = lambda: fill(rank, size.work, self.inputs, self.hidden)
        self.replay = record(self.launch)

    def fill_up(self) -> None:
        """Write the inputs of a made-up batch. The store must be empty."""
        table = self.inputs.table
        request_numbers = self.inputs.numbers
        numbers = torch.arange(table.shape[1], device=table.device)
        requests = (numbers // self.inputs.width).clamp(
            max=request_numbers.table.shape[1] - 1
        )
        places = SPARE + 1 + numbers
        table.copy_(
            torch.stack(
                (
                    requests,
                    numbers % self.inputs.width,
                    numbers,
                    places,
                    numbers,
                    numbers * 0,
                )
            )
        )
        self.hidden.copy_(
            torch.sin(torch.arange(self.hidden.numel(), device=numbers.device)).view_as(
                self.hidden
            )
        )
        request_numbers.table.zero_()
        for number in (Number.VALUE, Number.OBSERVED, Number.EDITED):
            request_numbers[number].fill_(0.5)
        for number in (Number.GUARANTEED, Number.LEAST):
            request_numbers[number].fill_(1)
        self.store.masked[places] = True
        self.holds = self.numbers = None

    def __call__(
        self, hidden: Tensor, group: BatchCandidates, numbers: RequestNumbers
    ) -> tuple[Filled, TokenStatistics]:
        """``hidden`` covers all rows of the batch. The next replay of any graph
        overwrites the statistics.
        """
        num_candidates = group.positions.numel()
        inputs = self.inputs
        if self.holds is not group:
            inputs.table[:, :num_candidates] = group.table
            inputs.table[:, num_candidates:] = self.filler
            if inputs.certainty is not None:
                inputs.certainty[:num_candidates] = required(group.certainty)
            if inputs.responses is not None:
                places = required(group.responses)
                inputs.responses[:, : places.shape[1]] = places
                inputs.responses[:, places.shape[1] :] = self.no_position
            self.holds = group
        is_new = self.numbers is None or not np.array_equal(
            self.numbers.table, numbers.table
        )
        if is_new:
            num_requests = numbers.table.shape[1]
            inputs.numbers.table[:, :num_requests] = on_device(
                numbers.table, hidden.device
            )
            self.numbers = numbers
        torch.index_select(hidden, 0, inputs.table[4], out=self.hidden)
        filled, statistics = self.replay()
        rest = self.hidden.shape[0] - num_candidates
        return filled[:, :num_candidates].clone(), statistics.split(
            [num_candidates, rest]
        )[0] if rest else statistics


class StepGraphs:
    """The graphs of one rank. They run those parts of steps that can be recorded."""

    def __init__(self, rank: Rank, record: Record) -> None:
        self.rank, self.record, self.store = rank, record, rank.store
        self.launches_before = 0
        """Number of launches of equal work before it is recorded."""
        self.tokens: Tensor | None = None
        self._forget_outdated()

    def _forget_outdated(self) -> None:
        """Drop all graphs if canvases have moved, because graphs read and write them at
        the recorded addresses.
        """
        if self.store.tokens is self.tokens:
            return
        self.tokens = self.store.tokens
        rank = self.rank
        record = self.record
        self.forwards: GraphCache[ForwardSize, ForwardGraph] = GraphCache(
            partial(ForwardGraph, rank, record)
        )
        self.layouts: GraphCache[Hashable, LayoutGraph] = GraphCache(
            lambda _, *given: LayoutGraph(rank, record, *given)
        )
        self.fillings: GraphCache[FillingSize, FillingGraph] = GraphCache(
            partial(FillingGraph, rank, record)
        )

    def problem(self, max_error: float) -> str | None:
        """Describe a difference between a graph and the same work launched, on made-up
        numbers; None if both agree. Writes to the first page of the pool and to the
        canvases. ``max_error``: largest error of hidden states, relative to the largest
        of them.
        """
        if self.rank.pages is not None:
            self.rank.pages.memory[1].normal_()
        for (num_requests, num_rows, *_), forward in self.forwards.graphs.items():
            used = forward.fill_up(page=1)
            launched = forward.launch()[:used].float()
            error = float(
                (forward.replay()[:used].float() - launched).abs().max()
                / launched.abs().max()
            )
            if not error <= max_error:
                return (
                    f"a replayed pass of {num_requests} requests with {num_rows} rows "
                    f"differs by {error:.1e} from a launched one"
                )
        for size, filling in self.fillings.graphs.items():
            filling.fill_up()
            expected = filling.launch()[0].clone()
            filling.fill_up()
            if not torch.equal(filling.replay()[0], expected):
                return (
                    f"replayed filling of {size.num_candidates} candidates differs "
                    f"from launched filling"
                )
        return None

    def forward(
        self, batch: StepBatch, layer_pass: LayerPass
    ) -> tuple[Tensor, Results] | None:
        """Run a pass from a graph. Returns the hidden states ``[num_rows,
        hidden_size]``, which the next step overwrites, and the results of the pass;
        None: launch the pass.
        """
        self._forget_outdated()
        if isinstance(layer_pass, PagedPass | DensePass):
            size = ForwardSize.of(batch, layer_pass)
            if size is not None:
                forward = self.forwards.get(size, self.launches_before)
                return None if forward is None else (forward(batch, layer_pass), ())
        parts = layer_pass.graph_parts()
        may_record = batch.only_reuses or batch.bounds[-1] <= HOST_BOUND_ROWS
        if parts is None or not may_record:
            return None
        key = (
            type(layer_pass),
            parts.layout,
            *(tensor.shape for tensor in parts.inputs),
        )
        graph = self.layouts.get(key, max(1, self.launches_before), batch, layer_pass)
        return None if graph is None else graph(batch, layer_pass)

    def fill(
        self,
        hidden: Tensor,
        group: BatchCandidates,
        work: FillWork,
        numbers: RequestNumbers,
    ) -> tuple[Filled, TokenStatistics] | None:
        """Run ``fill`` of a group from a graph; None: launch it. ``hidden`` has all
        rows of the batch. The next replay overwrites the statistics."""
        specs = [group.batch.canvases[index].spec for index in group.members]
        num_candidates = group.positions.numel()
        delayed = sum(spec.layout.gen_length for spec in specs if spec.ends.delay_eos)
        rows = padded(num_candidates)
        width = padded(group.width)
        positions = padded(delayed)
        if (
            rows is None
            or width is None
            or positions is None
            or not worth_padding(num_candidates, rows)
        ):
            return None
        is_guided = any(spec.guidance is not None for spec in specs)
        if is_guided or group.biased or self.rank.predictor.tp_group.world_size > 1:
            return None
        self._forget_outdated()
        size = FillingSize(
            rows,
            width,
            positions if delayed else None,
            group.certainty is not None,
            work,
        )
        graph = self.fillings.get(size, self.launches_before)
        return None if graph is None else graph(hidden, group, numbers)
