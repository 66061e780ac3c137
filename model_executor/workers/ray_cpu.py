"""vLLM's Ray executor for machines without accelerators, where Ray places workers on
CPUs.
"""

from typing import Any

import ray
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc


class RayCPUWorkerProc(RayWorkerProc):
    """A worker without an accelerator from Ray."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), []


class RayCPUExecutor(RayExecutorV2):
    """One CPU of the Ray cluster per tensor-parallel rank."""

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        # The placement group's bundle reserves the CPU, so the actor in it needs no
        # other resource.
        return {}

    def _init_executor(self) -> None:
        CpuPlatform.ray_device_key = "CPU"
        # Replaces the actor class, which the inherited method names in its body.
        stock = ray_executor_v2.RayWorkerProc
        ray_executor_v2.RayWorkerProc = RayCPUWorkerProc
        try:
            super()._init_executor()
        finally:
            ray_executor_v2.RayWorkerProc = stock
