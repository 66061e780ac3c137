"""The graphs of one engine."""

from dataclasses import dataclass, field

import torch

from dllm_engine.model_executor.candidates import BatchCandidates, Filled
from dllm_engine.model_executor.canvas_store import CanvasStore
from dllm_engine.model_executor.layer_pass.base import LayerPass
from dllm_engine.model_executor.layer_pass.paged import PagedPass
from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.page_memory import PageView
from dllm_engine.model_executor.recording.filling import FillingGraph, FillingSize, filling_size
from dllm_engine.model_executor.recording.forward import ForwardGraph, ForwardSize, Records, forward_size
from dllm_engine.model_executor.recording.recorder import Recorder, Recordings
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.token_prediction import TokenPredictor
from dllm_engine.scheduler.step_plan import StepPlan


@dataclass
class StepGraphs:
    """Runs parts of steps from graphs where it can."""

    model: DiffusionDecoder
    predictor: TokenPredictor
    store: CanvasStore
    pages: PageView
    max_pages: int
    """The most pages of a request in a layer."""
    max_requests: int
    """The most requests of a batch."""
    records: Records
    record: Recorder
    forwards: Recordings[ForwardSize, ForwardGraph] = field(init=False)
    fillings: Recordings[FillingSize, FillingGraph] = field(init=False)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        model, store, pages, record = self.model, self.store, self.pages, self.record
        self.begun_with = store.tokens, model.num_loads
        """The canvases that the graphs read and write, and the weights at the time."""
        hidden = torch.empty(1, model.shape.hidden_size, dtype=pages.keys.dtype, device=pages.keys.device)
        self.forwards = Recordings(lambda size: ForwardGraph(model, store, pages, self.max_pages, record, size))
        self.fillings = Recordings(lambda size: FillingGraph(self.predictor, store, hidden, record, size))

    def _forget_outdated(self) -> None:
        tokens, num_loads = self.begun_with
        if self.store.tokens is not tokens or (self.model.num_loads != num_loads and not self.record.outlives_weights):
            self._begin()

    def problem(self, max_error: float) -> str | None:
        """What differs between a graph and the same work launched, on made-up numbers; None: nothing.

        For an idle engine: it writes to the first page of the pool and to the canvases.

        Args:
            max_error: of hidden states, over the largest of them.
        """
        self.pages.keys[1].normal_()
        self.pages.values[1].normal_()
        for (num_requests, num_rows, *_), forward in self.forwards.graphs.items():
            forward.fill_up(page=1)
            launched = forward.launch().float()
            error = float((forward.replay().float() - launched).abs().max() / launched.abs().max())
            if not error <= max_error:
                return f"{num_requests} requests of {num_rows} rows are off by {error:.1e} when they are replayed"
        for size, filling in self.fillings.graphs.items():
            filling.fill_up()
            expected = filling.launch().clone()
            filling.fill_up()
            if not torch.equal(filling.replay(), expected):
                return f"{size.num_candidates} candidates are filled otherwise when that is replayed"
        return None

    def forward(self, batch: StepBatch, layer_pass: LayerPass) -> torch.Tensor | None:
        """Hidden states ``[num_rows, hidden_size]``, to be read before the next step; None: launch it."""
        size = forward_size(batch, layer_pass, self.records, self.record.pads)
        if size is None:
            return None
        assert isinstance(layer_pass, PagedPass)
        self._forget_outdated()
        return self.forwards[size](batch, layer_pass)

    def fill(self, hidden: torch.Tensor, group: BatchCandidates, plans: list[StepPlan]) -> Filled | None:
        """What the step fills of ``group``; None: launch it. ``hidden`` is of all rows of the batch."""
        choices, guaranteed, least = group.choices(plans), group.guaranteed(plans), group.least(plans)
        if self.predictor.tp_group.world_size > 1:
            return None
        size = filling_size(group, choices, guaranteed, least, self.max_requests, self.record.pads)
        if size is None:
            return None
        self._forget_outdated()
        values = [choices[size.choice].get(i, 0.0) for i in range(len(plans))]
        return self.fillings[size](hidden, group, values, guaranteed, least)
