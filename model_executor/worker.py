"""What our workers have in common, whatever the device."""

from vllm.v1.worker.worker_base import CompilationTimes

from dllm_engine.model_executor.model_runner import DiffusionModelRunner


class DiffusionWorker:
    """To be mixed into vLLM's worker of a device."""

    model_runner: DiffusionModelRunner

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """There is nothing to compile."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def profile_layers(self, prompt_token_ids: list[int], gen_length: int) -> list[float]:
        """For ``LLM.profile_layers``, through vLLM's ``collective_rpc``."""
        return self.model_runner.profile_layers(prompt_token_ids, gen_length)

    def masked_logprobs(self, sequences: list[list[int]], masked: list[list[int]]) -> list[list[float]]:
        """For ``LLM.masked_logprobs``, through vLLM's ``collective_rpc``."""
        return self.model_runner.masked_logprobs(sequences, masked)
