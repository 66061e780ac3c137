"""MaskKV as slow, plain PyTorch: evicts prompt tokens per layer and KV head, on the schedule of ``plain_dllm_cache``.

The first forward pass attends in full; its mask queries vote on the prompt. From the second pass on every query, of
the prompt's rows too, attends to its head's retained prompt tokens and the whole response; the rest is NaN.

Readings where the paper leaves room, besides those of ``plain_dllm_cache``:

* The budget is a whole number of prompt tokens, the average per layer and KV head. Layer budgets count per KV head.
* A vote is a softmax over the keys of the whole canvas (equation 6; the pseudo-code's line names the prompt's keys).
  All response positions vote, since all are masked at the first pass.
* Boundary is the first and the last layer, one each; a model of one or two layers has no middle. Without a profile,
  or with one that sums to 0, all layers get the average.
* Floors as in Algorithms 2 and 3, and what they lose is lost. A head never keeps more than the prompt; the budget that
  Algorithm 2 gives a layer may be more than that.
* ``redistribute`` (not of the paper) instead takes the exact shares, unrounded also between the groups of layers,
  rounds them down, caps them at the prompt's length and gives the rest, one token at a time, to whoever below the cap
  lacks the most of its share; to the lowest index if two lack the same.
* Shares are computed in double precision, pool times mass before the division.
* Equal votes: the lowest position is kept first.
* ``pool_kernel_size`` (not of the paper) above 1: a head ranks positions by the most votes within so wide a window.
  Its mass, which its budget goes by, stays that of the votes themselves.
* A budget of at least the prompt's length evicts nothing.
* Prompt refreshes gather the positions that the first pass chose. A refresh of only the prompt reuses the response
  fully; nothing is verified then.
* No layer is refreshed in every pass. ``refresh_first_layer`` switches on that habit of dLLM-Cache's code.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from tests.oracles.decoding import Decoding
from tests.oracles.dllm_cache import AdaptiveCache, LayerCache
from tests.oracles.models import Layer


def mask_votes(q: torch.Tensor, k: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Votes ``[KV heads, prompt]`` of mask queries ``[masks, heads, d]`` with the keys ``[canvas, KV heads, d]``.

    The sum over the mask queries of their attention to each prompt position, averaged over the query heads that share
    a KV head.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    votes = torch.zeros(kv_heads, prompt_length)
    for h in range(heads):
        g = h * kv_heads // heads
        attention = (q[:, h] @ k[:, g].T / math.sqrt(q.shape[-1])).softmax(-1)
        votes[g] += attention.sum(0)[:prompt_length] / (heads // kv_heads)
    return votes


def pooled(votes: torch.Tensor, width: int) -> torch.Tensor:
    """The most votes within ``width // 2`` places of each position."""
    out = torch.empty_like(votes)
    for j in range(votes.shape[-1]):
        out[:, j] = votes[:, max(0, j - width // 2) : j + width // 2 + 1].max(-1).values
    return out


def keep_top(votes: torch.Tensor, count: int) -> list[int]:
    """The positions with the most votes, sorted."""
    return sorted(votes.argsort(descending=True, stable=True)[:count].tolist())


def largest_remainder(shares: Sequence[float], total: int, cap: int) -> list[int]:
    """Whole numbers near the shares, none above the cap, that sum to ``total`` or, if less, all caps."""
    out = [min(cap, math.floor(share)) for share in shares]
    while sum(out) < min(total, cap * len(shares)):
        below = [i for i in range(len(out)) if out[i] < cap]
        out[max(below, key=lambda i: (shares[i] - out[i], -i))] += 1
    return out


def layer_budgets(
    average: int,
    profile: Sequence[float] | None,
    num_layers: int,
    *,
    beta: float = 0.4,
    redistribute: bool = False,
    prompt_length: int = 0,
) -> list[int]:
    """Algorithm 2. ``prompt_length`` matters only to ``redistribute``."""
    if profile is None or sum(profile) == 0:
        return [average] * num_layers
    boundary = sorted({0, num_layers - 1})
    middle = [layer for layer in range(num_layers) if layer not in boundary]
    boundary_score, middle_score = sum(profile[layer] for layer in boundary), sum(profile[layer] for layer in middle)
    base = math.floor(beta * average)
    pool = (average - base) * num_layers
    boundary_pool = pool * boundary_score / (boundary_score + middle_score)
    if redistribute:
        shares = [
            base + (boundary_pool / len(boundary) if layer in boundary else (pool - boundary_pool) / len(middle))
            for layer in range(num_layers)
        ]
        return largest_remainder(shares, average * num_layers, prompt_length)
    middle_pool = pool - math.floor(boundary_pool)
    return [
        base + (math.floor(boundary_pool) // len(boundary) if layer in boundary else middle_pool // len(middle))
        for layer in range(num_layers)
    ]


def head_shares(masses: Sequence[float], layer_budget: int, alpha: float) -> list[float]:
    """The unrounded budget of each KV head: a base, and the pool in proportion to its mass of votes."""
    base = math.floor(alpha * layer_budget)
    pool = (layer_budget - base) * len(masses)
    return [base + pool * mass / sum(masses) for mass in masses]


def head_budgets(
    masses: Sequence[float],
    layer_budget: int,
    prompt_length: int,
    *,
    kind: str = "prompt_preference",
    alpha: float = 0.1,
    redistribute: bool = False,
) -> list[int]:
    """Stage 2 of Algorithm 3: tokens per KV head from the heads' masses of votes. ``kind`` "uniform": no preference."""
    if kind == "uniform":
        return [min(layer_budget, prompt_length)] * len(masses)
    shares = head_shares(masses, layer_budget, alpha)
    if redistribute:
        return largest_remainder(shares, layer_budget * len(masses), prompt_length)
    return [min(prompt_length, math.floor(share)) for share in shares]


class MaskKVCache(AdaptiveCache):
    """Evicts after the first forward pass."""

    adapt_beside_prompt = False

    def __init__(
        self,
        run: Decoding,
        *,
        kv_budget: int = 256,
        layer_budget: str = "boundary",
        profile: Sequence[float] | None = None,
        beta: float = 0.4,
        head_budget: str = "prompt_preference",
        alpha: float = 0.1,
        redistribute: bool = False,
        pool_kernel_size: int = 1,
        **refreshes: Any,
    ) -> None:
        super().__init__(run, **({"refresh_first_layer": False} | refreshes))
        self.prompt_length, num_layers = len(run.prompt), len(run.model.layers)
        assert layer_budget in ("boundary", "uniform")
        if kv_budget >= self.prompt_length:
            self.budgets, head_budget = [self.prompt_length] * num_layers, "uniform"
        else:
            shares = {"beta": beta, "redistribute": redistribute, "prompt_length": self.prompt_length}
            self.budgets = layer_budgets(
                kv_budget, profile if layer_budget == "boundary" else None, num_layers, **shares
            )
        self.head_budget, self.alpha, self.redistribute = head_budget, alpha, redistribute
        self.pool_kernel_size = pool_kernel_size
        self.retained: list[list[list[int]]] = []
        run.traces["retained_per_head"] = [self.retained]

    def visible(self, number: int) -> list[list[int]] | None:
        if self.forwards == 0:
            return None
        return [kept + list(range(self.prompt_length, self.run.cut)) for kept in self.retained[number]]

    def after_layer(self, number: int, layer: Layer, q: torch.Tensor, cache: LayerCache) -> None:
        if self.forwards == 0:
            self.vote(number, q, cache)
        for g, kept in enumerate(self.retained[number]):
            evicted = [position for position in range(self.prompt_length) if position not in kept]
            cache.k[evicted, g] = cache.v[evicted, g] = math.nan

    def vote(self, number: int, q: torch.Tensor, cache: LayerCache) -> None:
        votes = mask_votes(q[self.prompt_length :], cache.k, self.prompt_length)
        masses, budget = votes.double().sum(-1).tolist(), self.budgets[number]
        shares = {"alpha": self.alpha, "redistribute": self.redistribute}
        keep = head_budgets(masses, budget, self.prompt_length, kind=self.head_budget, **shares)
        ranked = pooled(votes, self.pool_kernel_size)
        self.retained.append([keep_top(scores, count) for scores, count in zip(ranked, keep, strict=True)])
        for g, count in enumerate(keep):
            ordered = ranked[g].double().sort(descending=True).values
            if 0 < count < len(ordered):
                last = ordered[count - 1]
                # Neighbours with the same maximum are equal in any arithmetic.
                others = ordered[ordered != last] if self.pool_kernel_size > 1 else ordered[count:]
                for margin in (1 - others / last).abs().tolist():
                    self.run.decided(10 * margin)
        if self.head_budget != "uniform" and not self.redistribute and 0 < budget < self.prompt_length:
            for share in head_shares(masses, budget, self.alpha):
                self.run.decided(abs(share - round(share)))  # rounding down decides


def plain_maskkv(run: Decoding, **options: Any) -> None:
    """``kv_budget``: retained prompt tokens, the average per layer and KV head. ``layer_budget``: "boundary" (Algorithm
    2 with ``profile``, the layers' importances) or "uniform". ``head_budget``: "prompt_preference" or "uniform"."""
    MaskKVCache(run, **options).decode()
