"""Budgets: numbers of prompt tokens that layers and their KV heads retain. A new budget
is a function and its name in ``LAYER_BUDGETS`` or ``HEAD_BUDGETS``.

Budgets of layers never sum to more than the average times the number of layers, so that
pages can be reserved before the request runs.
"""

from collections.abc import Callable, Sequence
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from dllm_engine.cache_methods.maskkv.method import MEASURED_IMPORTANCE
from dllm_engine.kernels.attention_scores import top_indices

PYRAMID_STEEPNESS = 20
"""PyramidKV's β (arXiv 2406.02069): the last layer retains a 20th of the average."""
SQUEEZE_SHARE = 0.4
"""SqueezeAttention (arXiv 2404.04793): share of the average budget that the least
important layers keep.
"""
SQUEEZE_CLUSTERS = 3
ADAPTIVE_UNIFORM_SHARE = 0.2
"""Ada-KV (arXiv 2407.11550): share of the budget that is split evenly."""

LayerBudget = Callable[[int, Sequence[float], float], list[float]]
HeadBudget = Callable[[Tensor, int, float], Tensor]


def layer_budgets(
    kind: str, average: int, importance: Sequence[float], *, base_share: float
) -> list[int]:
    """Tokens per KV head that each layer retains, as a mean over its heads. ``kind``: a
    name in ``LAYER_BUDGETS``; ``average``: mean over the layers (B̄), of which every
    layer gets at least ``base_share`` (MaskKV's β); ``importance``: importance of each
    layer, 0 if the budget needs none."""
    # The sum is NaN for a request that is about to end with an error.
    if kind in MEASURED_IMPORTANCE and not sum(importance) > 0:
        kind = "uniform"
    return [
        int(share) for share in LAYER_BUDGETS[kind](average, importance, base_share)
    ]


def boundary(
    average: int, importance: Sequence[float], base_share: float
) -> list[float]:
    """MaskKV, Algorithm 2: the first and the last layer are one group, the others
    another. The groups share what exceeds the base by their summed importance, and
    their layers share it evenly."""
    layers = len(importance)
    at_boundary = [layer in (0, layers - 1) for layer in range(layers)]
    base = int(base_share * average)
    pool = (average - base) * layers
    boundary_score = sum(compress(importance, at_boundary))
    other_score = sum(importance[1:-1])
    boundary_pool = int(pool * boundary_score / (boundary_score + other_score))
    pools = {True: boundary_pool, False: pool - boundary_pool}
    return [base + pools[inside] / at_boundary.count(inside) for inside in at_boundary]


def pyramid(
    average: int, importance: Sequence[float], base_share: float
) -> list[float]:
    """PyramidKV: budgets fall evenly from the first layer to the last."""
    layers = len(importance)
    if layers == 1:
        return [float(average)]
    last = average // PYRAMID_STEEPNESS
    first = 2 * average - last
    return [first - layer * (first - last) / (layers - 1) for layer in range(layers)]


def squeeze(
    average: int, importance: Sequence[float], base_share: float
) -> list[float]:
    """SqueezeAttention: the least important of three clusters of layers keeps 40 % of
    the average. All other layers share the rest evenly."""
    is_least = _clusters(np.array(importance)) == 0
    num_least = np.count_nonzero(is_least)
    layers = len(importance)
    if num_least == layers:
        return [float(average)] * layers
    kept = average * SQUEEZE_SHARE
    others = (average * layers - kept * num_least) / (layers - num_least)
    return [float(share) for share in np.where(is_least, kept, others)]


def _clusters(importance: np.ndarray) -> np.ndarray:
    """One-dimensional k-means from evenly spread centres; cluster 0 is the least
    important.
    """
    centres = np.linspace(importance.min(), importance.max(), SQUEEZE_CLUSTERS)
    members = np.empty(0)
    while True:
        distances = abs(importance[:, None] - centres)
        assigned = distances.argmin(axis=1)
        if np.array_equal(assigned, members):
            return assigned
        members = assigned
        for cluster in np.unique(members):
            centres[cluster] = importance[members == cluster].mean()


LAYER_BUDGETS: dict[str, LayerBudget] = {
    "uniform": lambda average, importance, base_share: (
        [float(average)] * len(importance)
    ),
    "boundary": boundary,
    "pyramid": pyramid,
    "squeeze": squeeze,
}


def head_budgets(
    kind: str, scores: Tensor, layer_budget: int, *, base_share: float
) -> Tensor:
    """Tokens that each KV head retains, at most ``num_tokens``; int64
    ``[num_kv_heads]``. ``kind``: a name in ``HEAD_BUDGETS``; ``scores``
    ``[num_kv_heads, num_tokens]``: scores of all heads of the model, not negative;
    ``layer_budget``: mean over the heads (B_l), of which every head gets at least
    ``base_share`` (MaskKV's α). It may exceed ``num_tokens``."""
    return (
        HEAD_BUDGETS[kind](scores, layer_budget, base_share)
        .long()
        .clamp(max=scores.shape[1])
    )


def prompt_preference(scores: Tensor, layer_budget: int, base_share: float) -> Tensor:
    """MaskKV, Algorithm 3: a base, and the rest in proportion to the attention that a
    head pays to the prompt.
    """
    masses = scores.double().sum(dim=1)
    base = int(base_share * layer_budget)
    pool = (layer_budget - base) * len(masses)
    total = masses.sum()
    # Scores are NaN for a request that is about to end with an error, and give no
    # shares.
    shared = (total > 0) & (total < torch.inf)
    return base + torch.where(shared, pool * masses / total, pool / len(masses))


def adaptive(scores: Tensor, layer_budget: int, base_share: float) -> Tensor:
    """Ada-KV, Algorithm 1: the number of a head's tokens among the highest scores of
    all heads, mixed with an even share."""
    num_heads, num_tokens = scores.shape
    best = top_indices(scores.flatten(), min(layer_budget * num_heads, scores.numel()))
    counts = torch.zeros(num_heads, dtype=torch.float64, device=scores.device)
    counts.index_add_(
        0, best // max(num_tokens, 1), torch.ones_like(best, dtype=torch.float64)
    )
    return ADAPTIVE_UNIFORM_SHARE * layer_budget + (1 - ADAPTIVE_UNIFORM_SHARE) * counts


HEAD_BUDGETS: dict[str, HeadBudget] = {
    "uniform": lambda scores, budget, base_share: torch.full(
        scores.shape[:1], budget, device=scores.device
    ),
    "prompt_preference": prompt_preference,
    "adaptive": adaptive,
}
