"""Cache methods, a folder each: ``method.py`` has the options, the plan and the pages,
``layer_pass.py`` the pass, if it is the method's own. An entry point in
``pyproject.toml`` names each; other packages add theirs the same way.

``method.py`` names its pass and does not import it, so that a scheduler imports no
model.
"""

from dllm_engine.cache_methods.base import CacheMethod
from dllm_engine.entry_points import EntryPointGroup
from dllm_engine.families import Attention

CACHE_METHODS = EntryPointGroup(
    "dllm.cache_methods", CacheMethod, reserved=("all", "auto")
)
"""By the name that ``cache_method`` takes."""
DEFAULT_METHODS: dict[Attention, str] = {
    "full": "none",
    "block_causal": "block",
    "causal": "block",
}
"""The method of ``cache_method="auto"`` by kind of attention; both are exact."""


def methods_for(attention: Attention) -> list[str]:
    """The names of the methods for a kind of attention."""
    return [
        name for name, method in CACHE_METHODS.items() if attention in method.attention
    ]
