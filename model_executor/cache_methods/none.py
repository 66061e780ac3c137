"""No cache: every step recomputes the whole canvas."""

from dllm_engine.model_executor.layer_pass import DensePass, LayerPass
from dllm_engine.model_executor.step_batch import StepBatch


class NoCache:
    """The decoding loop of LLaDA and Dream as released."""

    def layer_pass(self, batch: StepBatch) -> LayerPass:
        return DensePass(batch.cu_seqlens)
