"""The layer pass of ``dual`` (Fast-dLLM, arXiv 2505.22618)."""

from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.paged import OverwritePass, PagedPass, RetentionPass
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.scheduler.methods.fast_dllm import DualOptions


def dual_pass(batch: StepBatch, pages: PageMemory) -> PagedPass:
    """Keep the positions that the plan adds; if a refresh renews only near positions, keep every position in place."""
    options = batch.canvases[0].spec.cache
    assert isinstance(options, DualOptions)
    return (OverwritePass if options.refresh == "near" else RetentionPass)(batch, pages)
