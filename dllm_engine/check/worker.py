"""The GPU worker that checks its kernels and its memory before it loads a model."""

from dllm_engine.check.start_up import take_right_kernels
from dllm_engine.memory.start_up import check_gpu_memory
from dllm_engine.model_executor.workers.gpu import DiffusionGPUWorker


class CheckedGPUWorker(DiffusionGPUWorker):
    """Differs in these checks alone."""

    def init_device(self) -> None:
        super().init_device()
        assert self.device is not None
        take_right_kernels(self.vllm_config, self.device)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        check_gpu_memory(self.vllm_config, self.requested_memory)
        super().load_model(load_dummy_weights=load_dummy_weights)
