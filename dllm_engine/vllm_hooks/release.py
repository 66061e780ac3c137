"""Releases of vLLM that this package works with; others are refused."""

from typing import Any

from dllm_engine.version import __version__
from dllm_engine.vllm_hooks.companions import explain_uncaught

RELEASES = ("0.32", "0.33")
"""The releases that ``table.py`` was compared with. ``pyproject.toml`` asks for the same."""


class IncompatibleVLLMError(RuntimeError):
    """The installed vLLM is not one that this package works with; the text says what to install."""


def check_release() -> None:
    """Raise ``IncompatibleVLLMError`` if vLLM is missing or another release is installed."""
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise IncompatibleVLLMError(
            "vLLM is not installed; install it with this package's extra: pip install 'dllm-engine[cuda]', or [cpu]"
        ) from None
    if not vllm.__version__.startswith(tuple(f"{release}." for release in RELEASES)):
        raise IncompatibleVLLMError(
            f"vLLM {vllm.__version__} is installed, dllm-engine {__version__} works with vLLM "
            f"{' and '.join(RELEASES)}; install one of these"
        )


def unfit(what: str) -> IncompatibleVLLMError:
    """An error for a supported release of which a part differs."""
    import vllm

    return IncompatibleVLLMError(
        f"vLLM {vllm.__version__} does not suit this dllm-engine. {what}; install a vLLM that this dllm-engine supports"
    )


def refuse_models(reason: IncompatibleVLLMError) -> None:
    """Raise ``reason`` whenever one of our models is loaded. All other models work as before.

    It is raised when transformers reads the model's config, because nothing is known about this vLLM. If nobody catches
    it, as in ``vllm serve``, the process ends with the sentence and no traceback.
    """
    from transformers import AutoConfig, PretrainedConfig

    from dllm_engine.families import FAMILIES

    # Llama's type is also that of models that vLLM serves itself.
    for model_type in {family.model_type for family in FAMILIES.values()} - {"llama"}:

        def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
            raise reason

        refused = type("RefusedConfig", (PretrainedConfig,), {"model_type": model_type, "__init__": refuse})
        AutoConfig.register(model_type, refused, exist_ok=True)

    explain_uncaught(lambda error: str(error) if error is reason else None)
