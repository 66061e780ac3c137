"""What fills a step's tokens in, recorded: the head, statistics of its logits, the choice, and the canvas."""

from typing import NamedTuple

import torch

from dllm_engine.model_executor.candidates import BatchCandidates, Choice, Filled, filled_of
from dllm_engine.model_executor.canvas_store import SPARE, CanvasStore
from dllm_engine.model_executor.recording.recorder import Recorder, most_rows, padded
from dllm_engine.model_executor.token_prediction import GREEDY, TokenPredictor
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.selection import select


class FillingSize(NamedTuple):
    """What graphs differ in."""

    num_candidates: int
    width: int
    """Candidates and positions of one request."""
    num_requests: int
    """The most of a batch."""
    choice: Choice
    guaranteed: bool
    """Whether some request fills one candidate at least, whatever its rule says."""
    least: bool
    """Whether some request fills a number of them at least."""


def filling_size(
    group: BatchCandidates,
    choices: dict[Choice, dict[int, float]],
    guaranteed: list[int],
    least: list[int],
    max_requests: int,
    pads: bool,
) -> FillingSize | None:
    """The size of a graph that fills ``group``; None where there is none. Graphs are for greedy requests that choose
    alike and ask for tokens alone."""
    canvases = [group.batch.canvases[index] for index in group.members]
    if len(choices) != 1 or canvases[0].settings != GREEDY:
        return None
    if any(canvas.spec.delay_eos or canvas.spec.needs_per_step_output for canvas in canvases):
        return None
    plans = group.batch.plans
    if any(canvas.spec.certainty_sigma is not None for canvas in canvases) or any(group.enough(plans)):
        return None
    if any(plan.quota.observed is not None for plan in plans):
        return None
    if group.biased or canvases[0].constrained is not None or any(canvas.spec.alg_temp for canvas in canvases):
        return None
    (choice,) = choices
    num_candidates, width = padded(group.positions.numel()), padded(group.width)
    if choice.measure == "noise" or num_candidates is None or width is None:
        return None
    if num_candidates > most_rows(group.positions.numel(), pads):
        return None
    num_requests = max_requests if pads else len(plans)
    return FillingSize(num_candidates, width, num_requests, choice, any(guaranteed), any(least))


class FillingGraph:
    """Fills up to so many candidates. Those behind a batch's own, which fill the graph up, are no request's."""

    def __init__(
        self,
        predictor: TokenPredictor,
        store: CanvasStore,
        hidden: torch.Tensor,
        record: Recorder,
        size: FillingSize,
    ) -> None:
        """``hidden``: hidden states of any row, ``[1, hidden_size]``."""
        device, measure = hidden.device, size.choice.measure
        self.hidden = hidden.new_zeros(size.num_candidates, hidden.shape[1])
        # What fills the graph up belongs to one more request.
        self.filler = torch.tensor([size.num_requests, 0, 0, SPARE, 0], device=device)[:, None]
        self.table = self.filler.repeat(1, size.num_candidates)
        self.values = torch.zeros(size.num_requests + 1, device=device)
        self.guaranteed, self.least = (
            torch.zeros_like(self.values, dtype=torch.int64) if has_any else None
            for has_any in (size.guaranteed, size.least)
        )
        self.holds: BatchCandidates | None = None
        self.held_values: tuple[list[float], list[int], list[int]] = [], [], []
        self.store, self.width = store, size.width
        requests, offsets, positions, places, self.rows = self.table.unbind()

        def fill() -> torch.Tensor:
            statistics = predictor.predict(self.hidden, GREEDY, None, measure == "entropy", measure == "margin")
            confidence = statistics.confidence(measure, offsets).masked_fill(~store.masked[places], -torch.inf)
            numbers = self.values, size.width, self.guaranteed, self.least
            chosen = select(size.choice.rule, confidence, requests, offsets, *numbers)
            store.fill(places, statistics.token, chosen)
            return filled_of(requests, positions, statistics, chosen)

        self.launch = fill
        self.replay = record(fill)

    def fill_up(self) -> None:
        """Take in the numbers of a made-up batch. The store must be empty."""
        numbers = torch.arange(self.table.shape[1], device=self.table.device)
        requests = (numbers // self.width).clamp(max=self.values.shape[0] - 1)
        places = SPARE + 1 + numbers
        self.table.copy_(torch.stack((requests, numbers % self.width, numbers, places, numbers)))
        self.hidden.copy_(torch.sin(torch.arange(self.hidden.numel(), device=numbers.device)).view_as(self.hidden))
        self.values.fill_(0.5)
        for held in (self.guaranteed, self.least):
            if held is not None:
                held.fill_(1)
        self.store.masked[places] = True
        self.holds, self.held_values = None, ([], [], [])

    def __call__(
        self,
        hidden: torch.Tensor,
        group: BatchCandidates,
        values: list[float],
        guaranteed: list[int],
        least: list[int],
    ) -> Filled:
        """For each request of the batch: ``values`` of the rule, ``guaranteed`` and ``least`` as ``select`` wants
        them."""
        num_candidates = group.positions.numel()
        if self.holds is not group:
            self.table[:, :num_candidates] = group.table
            self.table[:, num_candidates:] = self.filler
            self.holds = group
        if self.held_values != (values, guaranteed, least):
            self.values[: len(values)] = on_device(values, hidden.device, self.values.dtype)
            for held, numbers in ((self.guaranteed, guaranteed), (self.least, least)):
                if held is not None:
                    held[: len(values)] = on_device(numbers, hidden.device)
            self.held_values = values, guaranteed, least
        torch.index_select(hidden, 0, self.rows, out=self.hidden)
        return self.replay()[:, :num_candidates].clone()
