"""Prompt tokens that each layer retains per KV head. A new budget is a function and its entry in ``LAYER_BUDGETS``.

Budgets never sum to more than the average times the number of layers, so that pages can be reserved before anything
runs.
"""

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
    """A way to split a budget between layers."""

    shares: Callable[[int, Sequence[float], float], list[float]]
    """``shares(average, importance, base_share)``, before rounding down."""
    importance: ImportanceName | None = None
    """The importance that it needs; None: none."""


def layer_budgets(
    kind: str, average: int, importance: Sequence[float], prompt_length: int, *, base_share: float
) -> list[int]:
    """Tokens per KV head that each layer retains, a mean over its heads.

    Args:
        kind: a name in ``LAYER_BUDGETS``.
        average: the mean over the layers (B̄).
        importance: one score per layer; all 0: not measured, and every layer gets the same.
        base_share: share of the average that every layer gets (MaskKV's β).
    """
    if average >= prompt_length:
        return [prompt_length] * len(importance)
    budget = LAYER_BUDGETS[kind]
    # The sum is no number for a request that is about to end with an error.
    if budget.importance is not None and not sum(importance) > 0:
        budget = LAYER_BUDGETS["uniform"]
    return [int(share) for share in budget.shares(average, importance, base_share)]


def uniform(average: int, importance: Sequence[float], base_share: float) -> list[float]:
    """The same for every layer."""
    return [float(average)] * len(importance)


def boundary(average: int, importance: Sequence[float], base_share: float) -> list[float]:
    """MaskKV, Algorithm 2: the first and the last layer are one group, the others another. The groups share what
    exceeds the base by their summed importance, and their layers share it evenly."""
    layers = len(importance)
    at_boundary = [layer in (0, layers - 1) for layer in range(layers)]
    base = int(base_share * average)
    pool = (average - base) * layers
    scores = [sum(s for s, inside in zip(importance, at_boundary, strict=True) if inside == b) for b in (True, False)]
    boundary_pool = int(pool * scores[0] / sum(scores))
    pools = {True: boundary_pool, False: pool - boundary_pool}
    return [base + pools[inside] / at_boundary.count(inside) for inside in at_boundary]


def pyramid(average: int, importance: Sequence[float], base_share: float) -> list[float]:
    """PyramidKV: falls evenly from the first layer to the last."""
    layers = len(importance)
    if layers == 1:
        return [float(average)]
    last = average // PYRAMID_STEEPNESS
    first = 2 * average - last
    return [first - layer * (first - last) / (layers - 1) for layer in range(layers)]


def squeeze(average: int, importance: Sequence[float], base_share: float) -> list[float]:
    """SqueezeAttention: of three clusters of layers, the least important keeps 40 % of the average. The others share
    the rest evenly."""
    clusters = _clusters(importance)
    least, layers = clusters.count(0), len(clusters)
    if least == layers:
        return [float(average)] * layers
    kept = average * SQUEEZE_SHARE
    others = (average * layers - kept * least) / (layers - least)
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


LAYER_BUDGETS: dict[str, LayerBudget] = {
    "uniform": LayerBudget(uniform),
    "boundary": LayerBudget(boundary, "layer_importance"),
    "pyramid": LayerBudget(pyramid),
    "squeeze": LayerBudget(squeeze, "attention_importance"),
}
