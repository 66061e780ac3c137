"""vLLM's CPU worker around our model runner."""

import ctypes
import os

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

from dllm_engine.model_executor.model_runner import DiffusionModelRunner
from dllm_engine.model_executor.workers.base import DiffusionWorker
from dllm_engine.model_executor.workers.parent import end_vllm_process_with_parent

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 512 << 20


class DiffusionCPUWorker(DiffusionWorker, CPUWorker):
    """Differs from vLLM's in the runner it makes, and has nothing to compile."""

    def init_device(self) -> None:
        end_vllm_process_with_parent()
        # Not the inherited one, which names vLLM's runner in its body.
        self.device = torch.device("cpu")
        method = self.distributed_init_method
        # Rank-local shared memory of vLLM's CPU collectives is found by this name.
        os.environ["VLLM_DIST_IDENT"] = (
            os.path.basename(method.removeprefix("file://")) if method.startswith("file://") else method.split(":")[-1]
        )
        init_worker_distributed_environment(
            self.vllm_config, self.rank, method, self.local_rank, current_platform.dist_backend
        )
        set_random_seed(self.model_config.seed)
        _keep_freed_memory()
        self.model_runner = DiffusionModelRunner(self.vllm_config, self.device)


def _keep_freed_memory() -> None:
    """Have glibc keep up to 512 MiB of freed memory for the next step.

    It would return each activation of a step to the system and take it back page by page: at 1,024 rows of 512 floats
    and 8 layers that is 19,000 page faults and a tenth of the step's time. Another allocator's `mallopt` does nothing.
    """
    if "CS_GNU_LIBC_VERSION" in os.confstr_names:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
