"""Sparse-dLLM (arXiv 2508.02558): retain the tokens outside the block that its queries find important."""

import torch
from vllm.distributed import tensor_model_parallel_all_reduce

from dllm_engine.kernels.eviction import mean_query_scores, select_retained
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.paged import RetentionPass, retain_outside_block
from dllm_engine.model_executor.retention.scorers import SCORERS, ScoredLayer
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.scheduler.methods.sparse import SparseOptions
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.scheduler.step_plan import StepPlan


def layer_pass(batch: StepBatch, pages: PageMemory) -> RetentionPass:
    """Bidirectional sparse caching; each layer retains its own set, shared by its heads."""
    options = batch.canvases[0].spec.cache
    assert isinstance(options, SparseOptions)
    return RetentionPass(
        batch,
        pages,
        _retain_important,
        needs_lse=SCORERS[options.scorer].needs_lse,
        observation_window=options.observation_window,
    )


def _retain_important(spec: DecodingSpec, plan: StepPlan, layer: ScoredLayer) -> torch.Tensor:
    """Algorithm 4, lines 8 to 15 (Algorithm 5 for ``scope="prefix"``): mean block query against each candidate's key,
    mean over heads, max-pooling over the candidates laid end to end, top-k."""
    options = spec.cache
    assert isinstance(options, SparseOptions)
    start, stop = plan.block
    device = layer.k.device
    prefix_only = options.scope == "prefix"
    candidates = torch.arange(start, device=device) if prefix_only else retain_outside_block(spec, plan, layer)
    kept_whole = torch.arange(stop, spec.canvas_length, device=device) if prefix_only else candidates[:0]
    # Every rank scores with its own heads; all must retain the same tokens. Only the order counts, not the scale.
    scores = tensor_model_parallel_all_reduce(_summed_scores(options, layer, candidates))
    chosen = select_retained(scores, plan.retained - kept_whole.numel(), options.pool_kernel_size)
    return torch.cat((candidates[chosen], kept_whole))


def _summed_scores(options: SparseOptions, layer: ScoredLayer, candidates: torch.Tensor) -> torch.Tensor:
    """Scores summed over this rank's heads, float32 ``[num_candidates]``."""
    if options.scorer == "mean_query":
        # The paper's: raw products, so that heads with large queries and keys count for more.
        return mean_query_scores(layer.q[layer.block], layer.k[candidates])
    return SCORERS[options.scorer].score(layer, candidates).sum(dim=0)
