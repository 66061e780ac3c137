"""How many prompt tokens each layer retains per KV head: the layer side of a retention budget.

Pure functions of whole numbers and of the importance of layers. Whatever the importance, budgets sum to no more than
the average of all layers, so that pages can be reserved before anything runs. A new one is a function and its entry in
``LAYER_BUDGETS``.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

PYRAMID_STEEPNESS = 20
"""PyramidKV's β (arXiv 2406.02069): the last layer retains a 20th of the average."""
SQUEEZE_SHARE = 0.4
"""SqueezeAttention (arXiv 2404.04793): share of the average that the least important layers keep."""
SQUEEZE_CLUSTERS = 3

ImportanceName = Literal["layer_importance", "attention_importance"]
"""1 − mean cosine between hidden states before and after a layer, or before and after its attention."""


class LayerBudget(NamedTuple):
    """How a budget is split."""

    shares: Callable[[int, Sequence[float], float, bool], list[float]]
    importance: ImportanceName | None = None
    """What it goes by, beside the number of layers."""


def layer_budgets(
    kind: str,
    average: int,
    importance: Sequence[float] | None,
    num_layers: int,
    prompt_length: int,
    *,
    base_share: float,
    redistribute: bool,
) -> list[int]:
    """Tokens per KV head that each layer retains; a mean over its heads, none of which retains more than the prompt.

    Args:
        kind: a name in ``LAYER_BUDGETS``.
        average: the target, a mean over the layers (B̄).
        importance: one score per layer, more important layers may get more; None: not measured.
        base_share: share of the average that every layer gets in any case (MaskKV's β).
        redistribute: hand on what rounding down and the cap at ``prompt_length`` leave, so that the budgets sum to
            ``average`` times the number of layers exactly.
    """
    if average >= prompt_length:
        return [prompt_length] * num_layers
    # Of a request that is about to end with an error, the sum is no number.
    known = importance if importance is not None and sum(importance) > 0 else [1.0] * num_layers
    if known is not importance and LAYER_BUDGETS[kind].importance is not None:
        kind = "uniform"
    shares = LAYER_BUDGETS[kind].shares(average, known, base_share, redistribute)
    if redistribute:
        return largest_remainder(shares, average * num_layers, prompt_length)
    return [int(share) for share in shares]


def uniform(average: int, importance: Sequence[float], base_share: float, exact: bool) -> list[float]:
    """The same for every layer."""
    return [float(average)] * len(importance)


def boundary(average: int, importance: Sequence[float], base_share: float, exact: bool) -> list[float]:
    """MaskKV, Algorithm 2: the first and last layer are one group, the others another; what exceeds the base is shared
    between the groups by their summed importance, and evenly inside a group. Unless ``exact``, the boundary's share
    is rounded down first."""
    layers = len(importance)
    at_boundary = [layer in (0, layers - 1) for layer in range(layers)]
    base = int(base_share * average)
    pool = (average - base) * layers
    summed = [sum(s for s, b in zip(importance, at_boundary, strict=True) if b == group) for group in (True, False)]
    boundary_pool = pool * summed[0] / sum(summed)
    if not exact:
        boundary_pool = int(boundary_pool)
    pools = {True: boundary_pool, False: pool - boundary_pool}
    return [base + pools[b] / at_boundary.count(b) for b in at_boundary]


def pyramid(average: int, importance: Sequence[float], base_share: float, exact: bool) -> list[float]:
    """PyramidKV: falling evenly from the first layer to the last."""
    layers = len(importance)
    if layers == 1:
        return [float(average)]
    last = average // PYRAMID_STEEPNESS
    first = 2 * average - last
    return [first - layer * (first - last) / (layers - 1) for layer in range(layers)]


def squeeze(average: int, importance: Sequence[float], base_share: float, exact: bool) -> list[float]:
    """SqueezeAttention: layers fall into three clusters by how much their attention changes its tokens; the least
    important one keeps 40% of the average, and the others share what it gives up evenly."""
    clusters = _clusters(importance)
    least = clusters.count(0)
    if least == len(clusters):
        return [float(average)] * len(clusters)
    kept = average * SQUEEZE_SHARE
    others = (average * len(clusters) - kept * least) / (len(clusters) - least)
    return [kept if cluster == 0 else others for cluster in clusters]


def _clusters(importance: Sequence[float]) -> list[int]:
    """One-dimensional k-means from evenly spread centres; cluster 0 is the least important."""
    low, high = min(importance), max(importance)
    if low == high:
        return [0] * len(importance)
    centres = [low + (high - low) * i / (SQUEEZE_CLUSTERS - 1) for i in range(SQUEEZE_CLUSTERS)]
    members: list[int] = []
    while True:
        assigned = [min(range(len(centres)), key=lambda c: abs(score - centres[c])) for score in importance]
        if assigned == members:
            return members
        members = assigned
        for cluster in range(len(centres)):
            scores = [s for s, c in zip(importance, members, strict=True) if c == cluster]
            centres[cluster] = sum(scores) / len(scores) if scores else centres[cluster]


def largest_remainder(shares: Sequence[float], total: int, cap: int) -> list[int]:
    """Whole numbers close to ``shares``, none above ``cap``, that sum to ``total`` (or all ``cap``, if that is less).

    Every share is rounded down; what is left goes, one by one, to whoever below the cap lacks most of its share (the
    first of equals).
    """
    amounts = [min(int(share), cap) for share in shares]
    lacking = [
        (amount - share, i) for i, (share, amount) in enumerate(zip(shares, amounts, strict=True)) if amount < cap
    ]
    heapq.heapify(lacking)
    for _ in range(min(total, cap * len(amounts)) - sum(amounts)):
        surplus, i = heapq.heappop(lacking)
        amounts[i] += 1
        if amounts[i] < cap:
            heapq.heappush(lacking, (surplus + 1, i))
    return amounts


LAYER_BUDGETS: dict[str, LayerBudget] = {
    "uniform": LayerBudget(uniform),
    "boundary": LayerBudget(boundary, "layer_importance"),
    "pyramid": LayerBudget(pyramid),
    "squeeze": LayerBudget(squeeze, "attention_importance"),
}
