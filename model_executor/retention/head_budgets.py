"""How many prompt tokens each KV head of a layer retains. A new one is a function and its name in ``HEAD_BUDGETS``."""

import math
from collections.abc import Callable

import torch

from dllm_engine.scheduler.methods.layer_budgets import largest_remainder

ADAPTIVE_UNIFORM_SHARE = 0.2
"""Ada-KV (arXiv 2407.11550): share of the budget that heads get evenly."""

HeadBudget = Callable[[torch.Tensor, int, float], list[float]]


def head_budgets(
    kind: str, scores: torch.Tensor, layer_budget: int, *, base_share: float, redistribute: bool
) -> list[int]:
    """Tokens that each KV head retains, none more than there are.

    Args:
        kind: a name in ``HEAD_BUDGETS``.
        scores: of all KV heads of the model, ``[num_kv_heads, num_tokens]``, none negative.
        layer_budget: the mean over the heads (B_l); it may exceed the number of tokens.
        base_share: share of the layer's budget that every head gets in any case (MaskKV's α).
        redistribute: hand on what rounding down and the cap leave, so that budgets sum to the layer's exactly.
    """
    num_heads, num_tokens = scores.shape
    shares = HEAD_BUDGETS[kind](scores, layer_budget, base_share)
    if redistribute:
        return largest_remainder(shares, layer_budget * num_heads, num_tokens)
    return [min(int(share), num_tokens) for share in shares]


def uniform(scores: torch.Tensor, layer_budget: int, base_share: float) -> list[float]:
    """The same for every head."""
    return [float(layer_budget)] * scores.shape[0]


def prompt_preference(scores: torch.Tensor, layer_budget: int, base_share: float) -> list[float]:
    """MaskKV, Algorithm 3: a base, and the rest in proportion to how much attention a head pays to the prompt."""
    masses = scores.double().sum(dim=1).tolist()
    base = int(base_share * layer_budget)
    pool = (layer_budget - base) * len(masses)
    total = sum(masses)
    # Of scores that are no numbers, of a request that is about to end with an error, no shares can be made.
    shared = 0 < total < math.inf
    return [base + (pool * mass / total if shared else pool / len(masses)) for mass in masses]


def adaptive(scores: torch.Tensor, layer_budget: int, base_share: float) -> list[float]:
    """Ada-KV, Algorithm 1: as many tokens as a head has among the highest scores of all heads together, mixed with an
    even share."""
    num_heads, num_tokens = scores.shape
    best = scores.flatten().topk(min(layer_budget * num_heads, scores.numel())).indices
    counts = torch.bincount(best // num_tokens, minlength=num_heads).tolist() if num_tokens else [0] * num_heads
    even = ADAPTIVE_UNIFORM_SHARE * layer_budget
    return [even + (1 - ADAPTIVE_UNIFORM_SHARE) * count for count in counts]


HEAD_BUDGETS: dict[str, HeadBudget] = {
    "uniform": uniform,
    "prompt_preference": prompt_preference,
    "adaptive": adaptive,
}
