"""No cache: every step recomputes the whole canvas, as LLaDA and Dream decode as released."""

from dllm_engine.model_executor.layer_pass.dense import DensePass
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.step_batch import StepBatch


def layer_pass(batch: StepBatch, pages: PageMemory) -> DensePass:
    """No pages are kept."""
    return DensePass(batch.row_bounds())
