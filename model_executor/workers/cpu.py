"""vLLM's CPU worker, with our model runner and its warm-up."""

import os
import re

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from dllm_engine.model_executor.model_runner import DiffusionModelRunner
from dllm_engine.model_executor.workers.base import DiffusionWorker
from dllm_engine.model_executor.workers.parent import end_vllm_process_with_parent


class DiffusionCPUWorker(DiffusionWorker, CPUWorker):
    """vLLM's worker with another runner, and its own warm-up."""

    def init_device(self) -> None:
        end_vllm_process_with_parent()
        # Replaces the inherited method, which names vLLM's runner in its body.
        self.device = torch.device("cpu")
        method = self.distributed_init_method
        # vLLM's CPU collectives find their shared memory by this name: the end of a
        # file's path, or a port.
        os.environ["VLLM_DIST_IDENT"] = re.split("[/:]", method)[-1]
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        self.model_runner = DiffusionModelRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Do nothing: a CPU needs no compilation."""
        return CompilationTimes(language_model=0.0, encoder=0.0)
