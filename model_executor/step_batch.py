"""The rows of one forward pass: all scheduled requests, flattened."""

from dataclasses import dataclass

import torch

from dllm_engine.scheduler.refresh_plan import StepPlan


@dataclass(frozen=True)
class StepBatch:
    """Requests in batch order; request i computes rows ``cu_seqlens[i]`` … ``cu_seqlens[i + 1] - 1``."""

    request_ids: list[str]
    plans: list[StepPlan]
    cu_seqlens: list[int]
    input_ids: torch.Tensor
    """``[num_rows]``"""
    positions: torch.Tensor
    """``[num_rows]``, positions in each request's canvas."""
