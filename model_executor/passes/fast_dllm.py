"""Fast-dLLM's caches (arXiv 2505.22618): ``prefix`` keeps what lies before the window, ``dual`` all but the
window."""

from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.paged import RetentionPass, retain_beginning, retain_outside_window
from dllm_engine.model_executor.step_batch import StepBatch


def prefix_pass(batch: StepBatch, pages: PageMemory) -> RetentionPass:
    """Retain the prompt and all finished blocks."""
    return RetentionPass(batch, pages, retain_beginning)


def dual_pass(batch: StepBatch, pages: PageMemory) -> RetentionPass:
    """Retain everything outside the window."""
    return RetentionPass(batch, pages, retain_outside_window)
