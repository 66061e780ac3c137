"""d3LLM's cache (arXiv 2601.07568): keys and values of the prompt and of finished blocks, renewed now and then."""

from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.paged import RetentionPass, retain_beginning
from dllm_engine.model_executor.step_batch import StepBatch


def layer_pass(batch: StepBatch, pages: PageMemory) -> RetentionPass:
    """Retain the beginning of the canvas as far as the plan says."""
    return RetentionPass(batch, pages, retain_beginning)
