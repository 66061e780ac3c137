"""vLLM's GPU worker around our model runner."""

from vllm.v1.worker.gpu_worker import Worker

from dllm_engine.model_executor.model_runner import DiffusionModelRunner
from dllm_engine.model_executor.workers.base import DiffusionWorker, end_with_parent


class DiffusionGPUWorker(DiffusionWorker, Worker):
    """Differs from vLLM's in the runner it makes, and compiles nothing."""

    def init_device(self) -> None:
        end_with_parent()
        super().init_device()

    def _make_model_runner(self) -> DiffusionModelRunner:
        assert self.device is not None
        return DiffusionModelRunner(self.vllm_config, self.device)
