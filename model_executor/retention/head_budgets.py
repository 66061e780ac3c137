"""Prompt tokens that each KV head of a layer retains. A new budget is a function and its name in ``HEAD_BUDGETS``."""

from collections.abc import Callable

import torch

from dllm_engine.kernels.eviction import top_indices

ADAPTIVE_UNIFORM_SHARE = 0.2
"""Ada-KV (arXiv 2407.11550): share of the budget that heads get evenly."""

HeadBudget = Callable[[torch.Tensor, int, float], torch.Tensor]


def head_budgets(kind: str, scores: torch.Tensor, layer_budget: int, *, base_share: float) -> torch.Tensor:
    """Tokens that each KV head retains, none more than there are; int64 ``[num_kv_heads]``.

    Args:
        kind: a name in ``HEAD_BUDGETS``.
        scores: of all KV heads of the model, ``[num_kv_heads, num_tokens]``, none negative.
        layer_budget: the mean over the heads (B_l); it may exceed the number of tokens.
        base_share: share of the layer's budget that every head gets in any case (MaskKV's α).
    """
    return HEAD_BUDGETS[kind](scores, layer_budget, base_share).long().clamp(max=scores.shape[1])


def uniform(scores: torch.Tensor, layer_budget: int, base_share: float) -> torch.Tensor:
    """The same for every head."""
    return torch.full(scores.shape[:1], layer_budget, dtype=torch.float64, device=scores.device)


def prompt_preference(scores: torch.Tensor, layer_budget: int, base_share: float) -> torch.Tensor:
    """MaskKV, Algorithm 3: a base, and the rest in proportion to how much attention a head pays to the prompt."""
    masses = scores.double().sum(dim=1)
    base = int(base_share * layer_budget)
    pool = (layer_budget - base) * len(masses)
    total = masses.sum()
    # Of scores that are no numbers, of a request that is about to end with an error, no shares can be made.
    shared = (total > 0) & (total < torch.inf)
    return base + torch.where(shared, pool * masses / total, pool / len(masses))


def adaptive(scores: torch.Tensor, layer_budget: int, base_share: float) -> torch.Tensor:
    """Ada-KV, Algorithm 1: as many tokens as a head has among the highest scores of all heads together, mixed with an
    even share."""
    num_heads, num_tokens = scores.shape
    best = top_indices(scores.flatten(), min(layer_budget * num_heads, scores.numel()))
    counts = torch.zeros(num_heads, dtype=torch.float64, device=scores.device)
    counts.index_add_(0, best // max(num_tokens, 1), torch.ones_like(best, dtype=torch.float64))
    return ADAPTIVE_UNIFORM_SHARE * layer_budget + (1 - ADAPTIVE_UNIFORM_SHARE) * counts


HEAD_BUDGETS: dict[str, HeadBudget] = {
    "uniform": uniform,
    "prompt_preference": prompt_preference,
    "adaptive": adaptive,
}
