"""Recorded filling in of tokens."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dllm_engine.model_executor.candidates import ALONE, BatchCandidates
from dllm_engine.model_executor.canvas_store import SPARE
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.filling import Filled, FillInputs, FillWork, Number, fill, response_places
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics, required

if TYPE_CHECKING:
    from dllm_engine.model_executor.graphs.step import StepGraphs


class FillingSize(NamedTuple):
    """Key of a graph that fills in tokens."""

    num_candidates: int
    width: int
    """Candidates and positions of one request."""
    num_positions: int | None
    """Positions of the responses, where some request delays end tokens."""
    has_certainty: bool
    work: FillWork


class FillingGraph:
    """The recorded filling in of up to so many candidates: the head, statistics of its logits, the choice, and the
    canvas. Candidates behind a batch's own, which fill the graph up, are no request's."""

    def __init__(self, engine: "StepGraphs", size: FillingSize) -> None:
        store, device = engine.store, engine.store.tokens.device
        width = engine.model.config.hidden_size
        self.hidden = torch.zeros(size.num_candidates, width, dtype=engine.dtype, device=device)
        # What fills the graph up belongs to one more request.
        self.filler = torch.tensor([engine.max_requests, 0, 0, SPARE, 0, ALONE], device=device)[:, None]
        self.no_position = self.filler[[0, 3]]
        self.inputs = FillInputs(
            self.filler.repeat(1, size.num_candidates),
            torch.zeros(len(Number), engine.max_requests + 1, dtype=torch.int64, device=device),
            torch.ones(size.num_candidates, device=device) if size.has_certainty else None,
            None if size.num_positions is None else self.no_position.repeat(1, size.num_positions),
            size.width,
        )
        self.store = store
        self.holds: BatchCandidates | None = None
        self.numbers: np.ndarray | None = None
        self.launch = lambda: fill(engine.predictor, store, engine.end_tokens, size.work, self.inputs, self.hidden)
        self.replay = engine.record(self.launch)

    def fill_up(self) -> None:
        """Take in the numbers of a made-up batch. The store must be empty."""
        table, request_numbers = self.inputs.table, self.inputs.numbers
        numbers = torch.arange(table.shape[1], device=table.device)
        requests = (numbers // self.inputs.width).clamp(max=request_numbers.shape[1] - 1)
        places = SPARE + 1 + numbers
        table.copy_(torch.stack((requests, numbers % self.inputs.width, numbers, places, numbers, numbers * 0)))
        self.hidden.copy_(torch.sin(torch.arange(self.hidden.numel(), device=numbers.device)).view_as(self.hidden))
        request_numbers.zero_()
        request_numbers.view(torch.float64)[[Number.VALUE, Number.OBSERVED, Number.EDITED]] = 0.5
        request_numbers[[Number.GUARANTEED, Number.LEAST]] = 1
        self.store.masked[places] = True
        self.holds = self.numbers = None

    def __call__(
        self, hidden: torch.Tensor, group: BatchCandidates, numbers: np.ndarray
    ) -> tuple[Filled, TokenStatistics]:
        """``hidden`` covers all rows of the batch. The statistics last until the next replay of any graph."""
        num_candidates, own = group.positions.numel(), self.inputs
        if self.holds is not group:
            own.table[:, :num_candidates], own.table[:, num_candidates:] = group.table, self.filler
            if own.certainty is not None:
                own.certainty[:num_candidates] = required(group.certainty)
            if own.responses is not None:
                places = response_places(group)
                own.responses[:, : places.shape[1]], own.responses[:, places.shape[1] :] = places, self.no_position
            self.holds = group
        if self.numbers is None or not np.array_equal(self.numbers, numbers):
            own.numbers[:, : numbers.shape[1]] = on_device(numbers, hidden.device)
            self.numbers = numbers
        torch.index_select(hidden, 0, own.table[4], out=self.hidden)
        filled, statistics = self.replay()
        rest = self.hidden.shape[0] - num_candidates
        return filled[:, :num_candidates].clone(), statistics.split([num_candidates, rest])[0] if rest else statistics
