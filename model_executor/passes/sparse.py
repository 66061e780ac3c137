"""Sparse-dLLM (arXiv 2508.02558): retain the tokens outside the window that its queries find important."""

import torch
from vllm.distributed import tensor_model_parallel_all_reduce

from dllm_engine.kernels.eviction import mean_query_scores, select_retained
from dllm_engine.kernels.paged_attention import attention_with_lse
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.paged import RetentionPass, retain_outside_window
from dllm_engine.model_executor.retention.scorers import SCORERS, ScoredLayer
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.scheduler.methods.sparse import SparseOptions


class SparsePass(RetentionPass):
    """Bidirectional sparse caching; each layer retains its own set, shared by its heads.

    Algorithm 4, lines 8 to 15 (Algorithm 5 for ``scope="prefix"``): mean query of the window against each candidate's
    key, mean over heads, max-pooling over the candidates laid end to end, top-k.
    """

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        options = batch.canvases[0].spec.cache
        assert isinstance(options, SparseOptions)
        self.options = options
        super().__init__(batch, pages, retain_outside_window)
        plans = [batch.plans[i] for i in self.updating]
        sizes = [group.rows.shape[1] for group in self.groups for _ in group.members]
        self.num_candidates = [
            plan.window.start if options.scope == "prefix" else size for plan, size in zip(plans, sizes, strict=True)
        ]
        """Of each request of ``updating``: they come first among what it may retain; the rest is retained anyway."""
        spans = [
            (rows.start, plan.window.start, plan.window.size, count, rows.start + plan.window.start, plan.window.size)
            for rows, plan, count in zip(map(batch.rows, self.updating), plans, self.num_candidates, strict=True)
        ]
        self.spans = on_device(spans, self.device)

    def _retained_rows(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Every rank scores with its own heads; all must retain the same tokens. Only the order counts, not the scale.
        scores = tensor_model_parallel_all_reduce(self._scores(layer, q, k, v))
        retained, first = [], 0
        for group in self.groups:
            count, of_group = self.num_candidates[first], slice(first, first + len(group.members))
            candidates, rest = group.rows[:, :count], group.rows[:, count:]
            chosen = select_retained(
                scores[of_group, :count], group.plan.retained - rest.shape[1], self.options.pool_kernel_size
            )
            retained += [torch.cat((candidates.gather(1, chosen), rest), dim=1).flatten()]
            first = of_group.stop
        return torch.cat(retained)

    def _scores(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Scores of each request's candidates, summed over this rank's heads, float32 ``[len(updating), most]``; what
        lies behind a request's last candidate is no score."""
        options, most = self.options, max(self.num_candidates)
        if options.scorer == "mean_query":
            # The paper's: raw products, so that heads with large queries and keys count for more.
            return mean_query_scores(q, k, self.spans, most)
        scorer = SCORERS[options.scorer]
        scores = torch.zeros(len(self.updating), most, device=self.device)
        for of_request, i, count in zip(scores, self.updating, self.num_candidates, strict=True):
            rows, canvas, plan = self.batch.rows(i), self.batch.canvases[i], self.batch.plans[i]
            own = q[rows], k[rows], v[rows]
            lse = attention_with_lse(*own, [0, canvas.spec.canvas_length])[1] if scorer.needs_lse else None
            scored = ScoredLayer.of(
                canvas, plan, *own[:2], lse, layer, self.pages.total_kv_heads, options.observation_window
            )
            candidates = on_device(retain_outside_window(canvas.spec, plan)[:count], self.device)
            of_request[:count] = scorer.score(scored, candidates).sum(dim=0)
        return scores
