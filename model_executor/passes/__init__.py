"""Cache methods: what a step writes to and reads from pages, and which layer pass it runs.

A new method is one file here, its entry below, and its row in ``scheduler/refresh_plan.py``.
"""

from collections.abc import Callable

from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes import dkv, dllm_cache, es_dllm, fast_dllm, freecache, maskkv, none, sparse
from dllm_engine.model_executor.passes.base import LayerPass
from dllm_engine.model_executor.step_batch import StepBatch

CACHE_METHODS: dict[str, Callable[[StepBatch, PageMemory | None], LayerPass]] = {
    "none": none.layer_pass,
    "prefix": fast_dllm.prefix_pass,
    "dual": fast_dllm.dual_pass,
    "sparse": sparse.layer_pass,
    "dkv": dkv.layer_pass,
    "dllm_cache": dllm_cache.layer_pass,
    "es_dllm": es_dllm.layer_pass,
    "maskkv": maskkv.layer_pass,
    "freecache": freecache.layer_pass,
}
"""Each makes the layer pass of a step; page memory is None for methods that keep nothing."""
