"""dllm-engine: diffusion language models (LLaDA, Dream) served inside vLLM.

``LLM`` and ``DiffusionParams`` are the Python API; importing the package itself is cheap, they load vLLM when used.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "DiffusionParams", "__version__"]

# In a checkout the subpackages kernels/, model_executor/ and scheduler/ lie beside this folder, not in it. Packaging
# maps them into place; this line does the same for code that runs from the repository root.
_CHECKOUT = Path(__file__).resolve().parent.parent
if all((_CHECKOUT / part).exists() for part in ("pyproject.toml", "kernels", "model_executor", "scheduler")):
    __path__.append(str(_CHECKOUT))

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams


def __getattr__(name: str) -> Any:
    if name in ("LLM", "DiffusionParams"):
        from dllm_engine.vllm_hooks.release import check_release

        check_release()  # what they import need not be there in another release
    if name == "LLM":
        from dllm_engine.llm import LLM

        return LLM
    if name == "DiffusionParams":
        from dllm_engine.params import DiffusionParams

        return DiffusionParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
