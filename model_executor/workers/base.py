"""Common base of our workers for all devices."""

from dllm_engine.decoding.probe import Logprobs, Probe
from dllm_engine.model_executor.model_runner import DiffusionModelRunner
from dllm_engine.model_executor.probes import masked_logprobs


class DiffusionWorker:
    """Mixin for vLLM's worker of a device."""

    model_runner: DiffusionModelRunner

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]

    def records_steps(self) -> bool:
        """Return True if steps run from CUDA graphs, for ``dllm check``."""
        return self.model_runner.denoiser.graphs is not None

    def execute_dummy_batch(self) -> None:
        """Data-parallel ranks of a dense model do not wait for each other."""

    def update_weights(self, update_info: dict | list[dict]) -> None:
        """Load a part of the weights. A trainer may send some tensors at a time, and
        need not send unchanged ones.
        """
        model = self.model_runner.model
        model.takes_parts = True
        try:
            super().update_weights(update_info)  # type: ignore[misc]
        finally:
            model.takes_parts = False

    def masked_logprobs(self, *probes: list[list[int]]) -> list[Logprobs]:
        """Answers to probes, for an engine without a process of its own."""
        return masked_logprobs(self.model_runner.rank, list(map(Probe, *probes)))
