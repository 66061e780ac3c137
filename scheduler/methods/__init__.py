"""Cache methods. A new one is a file here and an entry in ``CACHE_METHODS``; a layer
pass of its own is a file in ``model_executor/passes/``."""

from dllm_engine.families import Attention
from dllm_engine.scheduler.methods.base import CacheMethod
from dllm_engine.scheduler.methods.block import BLOCK
from dllm_engine.scheduler.methods.d2_cache import D2_CACHE
from dllm_engine.scheduler.methods.delayed import DELAYED
from dllm_engine.scheduler.methods.dkv import DKV
from dllm_engine.scheduler.methods.dllm_cache import DLLM_CACHE
from dllm_engine.scheduler.methods.es_dllm import ES_DLLM
from dllm_engine.scheduler.methods.fast_dllm import DUAL, PREFIX
from dllm_engine.scheduler.methods.freecache import FREECACHE
from dllm_engine.scheduler.methods.maskkv import MASKKV
from dllm_engine.scheduler.methods.none import NONE
from dllm_engine.scheduler.methods.sparse import SPARSE

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
