"""Fast-dLLM's caches (arXiv 2505.22618): ``prefix`` keeps what lies before the block, ``dual`` all but the block."""

from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.paged import RetentionPass, retain_before_block, retain_outside_block
from dllm_engine.model_executor.step_batch import StepBatch


def prefix_pass(batch: StepBatch, pages: PageMemory) -> RetentionPass:
    """Retain the prompt and all finished blocks."""
    return RetentionPass(batch, pages, retain_before_block)


def dual_pass(batch: StepBatch, pages: PageMemory) -> RetentionPass:
    """Retain everything outside the block."""
    return RetentionPass(batch, pages, retain_outside_block)
