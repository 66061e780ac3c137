"""dllm-engine: diffusion language models served inside vLLM.

``LLM``, ``DiffusionParams`` and ``Questions`` are the Python API; importing the package
itself is cheap, because they load vLLM only when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["LLM", "DiffusionParams", "Questions", "__version__"]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dllm_engine.decisions.answering import Questions
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams


def __getattr__(name: str) -> Any:
    modules = {
        "LLM": "dllm_engine.llm",
        "DiffusionParams": "dllm_engine.params",
        "Questions": "dllm_engine.decisions.answering",
    }
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dllm_engine.quiet import silence_alarms
    from dllm_engine.vllm_hooks.release import check_release

    silence_alarms()
    check_release()  # another release of vLLM may lack what they import
    return getattr(import_module(modules[name]), name)
