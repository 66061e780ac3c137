"""The rows of one forward pass: all scheduled requests, flattened."""

from dataclasses import dataclass

import torch

from dllm_engine.scheduler.decoding import DecodingSpec
from dllm_engine.scheduler.refresh_plan import StepPlan


@dataclass(frozen=True)
class StepBatch:
    """Requests in batch order; request i computes rows ``cu_seqlens[i]`` … ``cu_seqlens[i + 1] - 1``."""

    request_ids: list[str]
    plans: list[StepPlan]
    specs: list[DecodingSpec]
    cu_seqlens: list[int]
    input_ids: torch.Tensor
    """``[num_rows]``"""
    positions: torch.Tensor
    """``[num_rows]``, positions in each request's canvas."""
    page_tables: list[torch.Tensor]
    """Per request: page ids ``[num_layers, num_pages]`` int32; no pages where none are held."""

    def rows(self, index: int) -> slice:
        """Rows of a request."""
        return slice(self.cu_seqlens[index], self.cu_seqlens[index + 1])
