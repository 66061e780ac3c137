"""vLLM's executor of ranks in processes of their own."""

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from dllm_engine.model_executor.workers.parent import end_vllm_process_with_parent


class DiffusionMultiprocExecutor(MultiprocExecutor):
    """vLLM's executor, whose worker processes end with the engine's front end."""

    def _init_executor(self) -> None:
        super()._init_executor()
        end_vllm_process_with_parent()
