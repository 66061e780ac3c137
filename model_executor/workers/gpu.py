"""vLLM's GPU worker, with our model runner and its warm-up."""

import time

import torch
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes
from vllm.v1.worker.workspace import lock_workspace, reset_workspace_manager

from dllm_engine.model_executor.model_runner import DiffusionModelRunner
from dllm_engine.model_executor.warm_up import warm_up
from dllm_engine.model_executor.workers.base import DiffusionWorker
from dllm_engine.model_executor.workers.parent import end_vllm_process_with_parent


class DiffusionGPUWorker(DiffusionWorker, Worker):
    """vLLM's worker with another runner, and its own warm-up."""

    def init_device(self) -> None:
        end_vllm_process_with_parent()
        super().init_device()
        # For few rows, cuBLASLt chooses products that need no second kernel to add
        # partial sums. This saves 2 % of a step of 32 rows.
        torch.backends.cuda.preferred_blas_library("cublaslt")

    def _make_model_runner(self) -> DiffusionModelRunner:
        assert self.device is not None
        return DiffusionModelRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        start = time.perf_counter()
        warm_up(
            self.model_runner,
            self.load_config.use_tqdm_on_load and is_global_first_rank(),
        )
        if self.model_runner.denoiser.graphs is not None:
            # The workspace of vLLM's experts is freed when a larger one is needed, but
            # graphs would still use it.
            lock_workspace()
        freeze_gc_heap()  # all current objects live as long as the process
        return CompilationTimes(language_model=time.perf_counter() - start, encoder=0.0)

    def shutdown(self) -> None:
        super().shutdown()
        # The object refers to its worker, and would keep weights and pages on the GPU.
        reset_workspace_manager()
