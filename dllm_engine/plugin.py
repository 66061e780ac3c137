"""Entry point ``vllm.general_plugins``: runs in every vLLM process (API server, engine
core, workers).
"""

import logging

from dllm_engine.entry_points import PluginError
from dllm_engine.quiet import continue_quietly
from dllm_engine.vllm_hooks import patch, table
from dllm_engine.vllm_hooks.release import IncompatibleVLLMError, check_release, unfit

logger = logging.getLogger(f"vllm.{__name__}")


def register() -> None:
    """Register our models, or warn that this vLLM is incompatible or that a package
    with entry points is broken. vLLM serves other models as before.
    """
    try:
        register_or_raise()
    except (IncompatibleVLLMError, PluginError) as error:
        logger.warning("%s. The models of dllm-engine are not registered", error)


def register_or_raise() -> None:
    """Register our models, their configs and tokenizers, and replace what
    ``vllm_hooks/table.py`` lists. Idempotent. Raises ``IncompatibleVLLMError`` and
    ``PluginError``."""
    continue_quietly()  # in case no platform plugin was loaded
    check_release()
    try:
        patch.apply(table.EVERY_PROCESS)
        _register_models()
    except ImportError as error:
        if not (error.name or "").startswith("vllm."):
            raise
        raise unfit(str(error)) from None


def _register_models() -> None:
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from dllm_engine.model_executor.models.configs import (
        register_tokenizers,
        registered_classes,
    )
    from dllm_engine.model_executor.models.decoder import MODEL_CLASSES
    from dllm_engine.vllm_hooks.engine_config import DiffusionEngineConfig

    for model_type, config in registered_classes().items():
        AutoConfig.register(model_type, config, exist_ok=True)
    for architecture, model in MODEL_CLASSES.items():
        # The class, not its import path, because vLLM inspects a path in a subprocess,
        # which takes 16 s.
        ModelRegistry.register_model(architecture, model)
        MODELS_CONFIG_MAP[architecture] = DiffusionEngineConfig
    register_tokenizers()
