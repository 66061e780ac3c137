"""Layer pass of Fast-dLLM's DualCache."""

from dllm_engine.cache_methods.dual.method import DualOptions
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import LayerPass
from dllm_engine.model_executor.passes.paged import OverwritePass, RetentionPass
from dllm_engine.model_executor.step_batch import StepBatch


class DualPass(RetentionPass):
    """Pass that keeps the positions that the plan adds."""

    @classmethod
    def of(cls, batch: StepBatch, pages: PageMemory) -> LayerPass:
        """Pass of a batch. With refreshes of near positions, pages keep every position
        in place.
        """
        refreshes_near = DualOptions.of(batch.canvases[0].spec).refresh == "near"
        return (OverwritePass if refreshes_near else cls)(batch, pages)
