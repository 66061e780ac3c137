"""Cache methods, a folder each: ``method.py`` has the options, the plan and the pages,
``layer_pass.py`` the pass, if it is the method's own. A new one needs an entry in
``CACHE_METHODS``.

``method.py`` names its pass and does not import it, so that a scheduler imports no
model.
"""

from dllm_engine.cache_methods.base import CacheMethod
from dllm_engine.cache_methods.block.method import BLOCK
from dllm_engine.cache_methods.d2_cache.method import D2_CACHE
from dllm_engine.cache_methods.delayed.method import DELAYED
from dllm_engine.cache_methods.dkv.method import DKV
from dllm_engine.cache_methods.dllm_cache.method import DLLM_CACHE
from dllm_engine.cache_methods.dual.method import DUAL
from dllm_engine.cache_methods.es_dllm.method import ES_DLLM
from dllm_engine.cache_methods.freecache.method import FREECACHE
from dllm_engine.cache_methods.maskkv.method import MASKKV
from dllm_engine.cache_methods.none.method import NONE
from dllm_engine.cache_methods.prefix.method import PREFIX
from dllm_engine.cache_methods.sparse.method import SPARSE
from dllm_engine.families import Attention

CACHE_METHODS: dict[str, CacheMethod] = {
    "none": NONE,
    "prefix": PREFIX,
    "dual": DUAL,
    "sparse": SPARSE,
    "dkv": DKV,
    "dllm_cache": DLLM_CACHE,
    "es_dllm": ES_DLLM,
    "maskkv": MASKKV,
    "freecache": FREECACHE,
    "delayed": DELAYED,
    "d2_cache": D2_CACHE,
    "block": BLOCK,
}
"""By the name that ``cache_method`` takes."""
DEFAULT_METHODS: dict[Attention, str] = {"full": "none", "block_causal": "block"}
"""The method of ``cache_method="auto"`` by kind of attention; both are exact."""


def methods_for(attention: Attention) -> list[str]:
    """The names of the methods for a kind of attention."""
    return [
        name for name, method in CACHE_METHODS.items() if attention in method.attention
    ]
