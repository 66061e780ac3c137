"""Fast-dLLM's caches (arXiv 2505.22618): ``prefix`` keeps what lies before the window, ``dual`` all but the
window."""

from dllm_engine.model_executor.layer_pass.paged import OverwritePass, PagedPass, RetentionPass
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.scheduler.methods.fast_dllm import DualOptions

prefix_pass = RetentionPass
"""Its plans say which positions are kept."""


def dual_pass(batch: StepBatch, pages: PageMemory) -> PagedPass:
    """As ``prefix_pass``; where a refresh renews what is near, every position is kept, in its place."""
    options = batch.canvases[0].spec.cache
    assert isinstance(options, DualOptions)
    return (OverwritePass if options.refresh == "near" else RetentionPass)(batch, pages)
