"""Cache methods with their tensors: the layer pass of a step, by the names of ``scheduler/methods/``."""

from collections.abc import Callable

from dllm_engine.model_executor.layer_pass.base import LayerPass
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes import (
    block,
    d2_cache,
    delayed,
    dkv,
    dllm_cache,
    es_dllm,
    fast_dllm,
    freecache,
    maskkv,
    none,
    sparse,
)
from dllm_engine.model_executor.step_batch import StepBatch

PASSES: dict[str, Callable[[StepBatch, PageMemory], LayerPass]] = {
    "none": none.layer_pass,
    "prefix": fast_dllm.prefix_pass,
    "dual": fast_dllm.dual_pass,
    "sparse": sparse.SparsePass,
    "dkv": dkv.layer_pass,
    "dllm_cache": dllm_cache.layer_pass,
    "es_dllm": es_dllm.EarlySkipPass,
    "maskkv": maskkv.MaskKVPass,
    "freecache": freecache.layer_pass,
    "delayed": delayed.layer_pass,
    "d2_cache": d2_cache.RolloutPass,
    "block": block.layer_pass,
}
"""Each makes the layer pass of a step."""
