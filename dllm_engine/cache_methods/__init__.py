"""Cache methods, one folder each: ``method.py`` has the options, the plan and the
pages, and ``layer_pass.py`` the layer pass, if no shared one fits. An entry point in
``pyproject.toml`` names each method. Other packages add methods in the same way.

``method.py`` names its pass and does not import it, so that a scheduler imports no
model.
"""

from dllm_engine.cache_methods.base import CacheMethod
from dllm_engine.entry_points import EntryPointGroup
from dllm_engine.families import Attention

CACHE_METHODS = EntryPointGroup(
    "dllm.cache_methods", CacheMethod, reserved=("all", "auto")
)
"""Cache methods by their names in the option ``cache_method``."""
DEFAULT_METHODS: dict[Attention, str] = {
    "full": "none",
    "block_causal": "block",
    "causal": "block",
}
"""The method of ``cache_method="auto"`` by kind of attention; both are exact."""


def methods_for(attention: Attention) -> list[str]:
    """Names of the methods for a kind of attention."""
    return [
        name for name, method in CACHE_METHODS.items() if attention in method.attention
    ]
