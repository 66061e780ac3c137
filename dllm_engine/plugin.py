"""Entry point ``vllm.general_plugins``: runs in every vLLM process (API server, engine core, workers)."""


def register() -> None:
    """Teach vLLM our models, their configs and tokenizers, the checks and figures of their requests, metrics, and
    what its HTTP server has of ours.

    Idempotent.
    """
    from transformers import AutoConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.model_executor.models.registry import ModelRegistry

    from dllm_engine import admission, figures, metrics, provisional, server_app
    from dllm_engine.config_hook import DiffusionConfig
    from dllm_engine.families import FAMILIES
    from dllm_engine.model_executor.models import configs
    from dllm_engine.model_executor.models.dream import DreamModel
    from dllm_engine.model_executor.models.llada import LLaDAModelLM
    from dllm_engine.model_executor.models.tokenizers import register_tokenizers
    from dllm_engine.model_executor.page_memory import register_pool_spec

    AutoConfig.register("llada", configs.LLaDAConfig, exist_ok=True)
    AutoConfig.register("Dream", configs.DreamConfig, exist_ok=True)
    for family, model in zip(FAMILIES.values(), (LLaDAModelLM, DreamModel), strict=True):
        # The class, not its import path: vLLM inspects a path in a subprocess, for 16 s.
        ModelRegistry.register_model(family.architecture, model)
        MODELS_CONFIG_MAP[family.architecture] = DiffusionConfig
    register_tokenizers()
    register_pool_spec()
    admission.install()
    figures.install()
    provisional.install()
    metrics.install()
    server_app.install()
