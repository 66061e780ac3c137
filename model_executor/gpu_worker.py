"""vLLM's GPU worker around our model runner."""

from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from dllm_engine.model_executor.model_runner import DiffusionModelRunner


class DiffusionGPUWorker(Worker):
    """Differs from vLLM's in the runner it makes, and compiles nothing."""

    def _make_model_runner(self) -> DiffusionModelRunner:
        assert self.device is not None
        return DiffusionModelRunner(self.vllm_config, self.device)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_dummy_batch(self) -> None:
        """Data-parallel ranks of a dense model do not wait for each other."""
