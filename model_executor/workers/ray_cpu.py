"""vLLM's Ray executor for machines without accelerators, where Ray has only CPUs to
place workers on.
"""

from typing import Any

import ray
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc


class RayCPUWorkerProc(RayWorkerProc):
    """A worker that Ray gave no accelerator."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), []


class RayCPUExecutor(RayExecutorV2):
    """One CPU of the Ray cluster per tensor-parallel rank."""

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        # The placement group's bundle holds the CPU; the actor inside it asks for
        # nothing more.
        return {}

    def _init_executor(self) -> None:
        CpuPlatform.ray_device_key = "CPU"
        # The inherited method names its actor class in its body.
        stock = ray_executor_v2.RayWorkerProc
        ray_executor_v2.RayWorkerProc = RayCPUWorkerProc
        try:
            super()._init_executor()
        finally:
            ray_executor_v2.RayWorkerProc = stock
