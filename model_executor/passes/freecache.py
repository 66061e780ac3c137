"""FreeCache (arXiv 2505.21467): keys and values of the prompt and of finished blocks, computed once and kept."""

from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.paged import RetentionPass, retain_beginning
from dllm_engine.model_executor.step_batch import StepBatch


def layer_pass(batch: StepBatch, pages: PageMemory) -> RetentionPass:
    """Retains what ``prefix`` does, but appends each finished block to what pages hold already."""
    return RetentionPass(batch, pages, retain_beginning)
