"""No cache: every step recomputes the whole canvas."""

from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import DensePass
from dllm_engine.model_executor.step_batch import StepBatch


def layer_pass(batch: StepBatch, pages: PageMemory | None) -> DensePass:
    """The decoding loop of LLaDA and Dream as released."""
    return DensePass(batch.cu_seqlens)
