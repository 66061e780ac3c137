"""The rows of one forward pass: all scheduled requests, flattened."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from dllm_engine.model_executor.token_prediction import SamplingSettings
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.policy import TokenLogprobs
from dllm_engine.scheduler.decoding import DecodingSpec
from dllm_engine.scheduler.page_layout import PageKind
from dllm_engine.scheduler.step_plan import StepPlan


@dataclass
class Canvas:
    """A request's tokens on the device, and what its next step must know of the last ones."""

    spec: DecodingSpec
    seed: int
    """Key of its random numbers, as the int64 of the same bits."""
    settings: SamplingSettings
    start: int = field(init=False)
    """Of its part of the ``CanvasStore``, whose views these two are:"""
    tokens: torch.Tensor = field(init=False)
    """``[canvas_length]`` int64: the prompt, then the response, masked positions holding the mask token."""
    masked: torch.Tensor = field(init=False)
    """``[canvas_length]`` bool."""
    last_unmasked: list[int] = field(default_factory=list)
    """Positions that the last step filled, ascending."""
    page_tables: dict[PageKind, torch.Tensor] = field(default_factory=dict)
    """Page ids per kind, ``[num_layers, most pages of a layer]`` int32; a layer with fewer is padded."""
    guide_text: list[int] = field(default_factory=list)
    """The guide's tokens whose keys and values its pages hold."""
    logprobs: TokenLogprobs | None = None
    """Of each canvas position, as of the last step that predicted it; None where the request does not ask."""
    confidences: torch.Tensor | None = None
    """``[canvas_length]`` float32: probability of each position's token, as of the last step that predicted it, NaN
    before; None where the request does not stream by step."""
    cache_state: Any = None
    """What the engine's cache method keeps of this request beside pages."""


@dataclass(frozen=True)
class StepBatch:
    """Requests in batch order; request i computes rows ``cu_seqlens[i]`` … ``cu_seqlens[i + 1] - 1``."""

    request_ids: list[str]
    plans: list[StepPlan]
    canvases: list[Canvas]
    cu_seqlens: list[int]
    input_ids: torch.Tensor
    """``[num_rows]``"""
    positions: torch.Tensor
    """``[num_rows]``, positions in each request's canvas; ascending within a request."""

    def rows(self, index: int) -> slice:
        """Rows of a request."""
        return slice(self.cu_seqlens[index], self.cu_seqlens[index + 1])

    def num_rows(self, index: int) -> int:
        return self.cu_seqlens[index + 1] - self.cu_seqlens[index]

    def request_of_row(self) -> torch.Tensor:
        """``[num_rows]`` int64: the request that each row belongs to."""
        sizes = on_device([self.num_rows(i) for i in range(len(self.canvases))], self.positions.device)
        requests = torch.arange(len(self.canvases), device=self.positions.device)
        return requests.repeat_interleave(sizes, output_size=self.cu_seqlens[-1])


def ranges(starts: Sequence[int], sizes: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranges of integers end to end: the number of the range that each belongs to, and the integers; int64 each."""
    before = accumulate(sizes, initial=0)
    shifts = [start - first for start, first in zip(starts, before, strict=False)]
    of_ranges = on_device([sizes, shifts], device)
    # Without the length of the result a device would have to be asked for it.
    total = sum(sizes)
    owners = torch.arange(len(sizes), device=device).repeat_interleave(of_ranges[0], output_size=total)
    return owners, torch.arange(total, device=device) + of_ranges[1, owners]
