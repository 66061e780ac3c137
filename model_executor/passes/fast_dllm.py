"""Fast-dLLM's caches (arXiv 2505.22618): ``prefix`` keeps what lies before the block, ``dual`` all but the block."""

import torch

from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import RetentionPass
from dllm_engine.model_executor.retention.scorers import ScoredLayer
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.scheduler.step_plan import StepPlan


def prefix_pass(batch: StepBatch, pages: PageMemory | None) -> RetentionPass:
    """Retain the prompt and all finished blocks."""
    assert pages is not None
    return RetentionPass(batch, pages, before_block)


def dual_pass(batch: StepBatch, pages: PageMemory | None) -> RetentionPass:
    """Retain everything outside the block, the masked suffix included."""
    assert pages is not None
    return RetentionPass(batch, pages, _retain_outside)


def before_block(spec: DecodingSpec, plan: StepPlan, layer: ScoredLayer) -> torch.Tensor:
    """Canvas positions of the prompt and the finished blocks."""
    return torch.arange(plan.block.start, device=layer.k.device)


def _retain_outside(spec: DecodingSpec, plan: StepPlan, layer: ScoredLayer) -> torch.Tensor:
    return outside_block(spec, plan, layer.k.device)


def outside_block(spec: DecodingSpec, plan: StepPlan, device: torch.device) -> torch.Tensor:
    """Canvas positions before and after the block, ascending."""
    start, stop = plan.block
    return torch.cat((torch.arange(start, device=device), torch.arange(stop, spec.canvas_length, device=device)))
