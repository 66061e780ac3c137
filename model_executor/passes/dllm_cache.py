"""dLLM-Cache (arXiv 2506.06295): prompt and response are refreshed at intervals of their own, and between them the
response rows whose values have changed most.

As in the authors' code the first layer recomputes every row of the response in every step (``refresh_first_layer``): it
costs one layer and lets changed tokens enter all others. Of the prompt its keys and values stay as they are, because
nothing but the tokens enters them.
"""

from dllm_engine.model_executor.batch_tables import TokenTables
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.adaptive import AdaptivePass
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.scheduler.methods.dllm_cache import DLLMCacheOptions, live_start


def dllm_cache_pass(batch: StepBatch, pages: PageMemory) -> AdaptivePass:
    """K/V of the whole canvas by position, features of the rows from the last that the response needs."""
    options = batch.canvases[0].spec.cache
    assert isinstance(options, DLLMCacheOptions)
    return AdaptivePass(
        batch,
        pages,
        TokenTables(batch, pages, [plan.read for plan in batch.plans]),
        [live_start(canvas.spec) for canvas in batch.canvases],
        whole_attends_alone=True,
        similarity=options.similarity,
        metric=options.similarity_metric,
        first_adaptive_layer=int(options.refresh_first_layer),
    )
