"""The GPU worker that checks its kernels before it loads a model."""

from dllm_engine.check.start_up import take_right_kernels
from dllm_engine.model_executor.workers.gpu import DiffusionGPUWorker


class CheckedGPUWorker(DiffusionGPUWorker):
    """Differs in this check alone."""

    def init_device(self) -> None:
        super().init_device()
        assert self.device is not None
        take_right_kernels(self.vllm_config, self.device)
