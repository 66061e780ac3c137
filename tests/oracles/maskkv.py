"""MaskKV as slow, plain PyTorch: evicts prompt tokens per layer and KV head, on the
schedule of ``plain_dllm_cache``.

The first forward pass attends in full; its mask queries vote on the prompt. From the
second pass on every query, of the prompt's rows too, attends to its head's retained
prompt tokens and the whole response; the rest is NaN.

Readings where the paper leaves room, besides those of ``plain_dllm_cache`` and
docs/methods.md:

* Boundary is the first and the last layer, one each. If no layer changes anything, all
  layers get the average.
* SqueezeAttention's three clusters are those that k-means finds from the lowest, the
  highest and the number between.
* Floors as in Algorithms 2 and 3, and what they lose is lost. Shares are computed in
  double precision, pool times mass before the division. Equal votes: the lowest
  position is kept first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.oracles.decoding import Decoding
from tests.oracles.dllm_cache import AdaptiveCache
from tests.oracles.models import PlainModel, attention_weights

SNAPKV_WINDOW = 32


def importance(
    model: PlainModel, canvas: Sequence[int], *, of_attention: bool
) -> list[float]:
    """Per layer 1 − mean cosine between hidden states before and after it, or before
    and after its attention.
    """
    x, out = model.embed(canvas), []
    for layer in model.layers:
        q, k, v = model.qkv(layer, x, range(len(canvas)))
        attended = x + model.attention(layer, q, k, v)
        after = attended + model.mlp(layer, attended)
        changed = attended if of_attention else after
        out.append(
            1
            - float(
                torch.cosine_similarity(x.double(), changed.double(), dim=-1).mean()
            )
        )
        x = after
    return out


def squeeze(average: int, scores: Sequence[float]) -> list[int]:
    """SqueezeAttention: the least important cluster keeps 0.4 of the average, the
    others share what that leaves.
    """
    low, high = min(scores), max(scores)
    centres, clusters = [low, (low + high) / 2, high], None
    while True:
        nearest = [
            min((abs(score - centre), i) for i, centre in enumerate(centres))[1]
            for score in scores
        ]
        if nearest == clusters:
            break
        clusters = nearest
        for i in set(clusters):
            own = [
                score
                for score, cluster in zip(scores, clusters, strict=True)
                if cluster == i
            ]
            centres[i] = sum(own) / len(own)
    least = clusters.count(0)
    if low == high:
        return [average] * len(scores)
    kept, total = 0.4 * average, average * len(scores)
    return [
        int(kept if i == 0 else (total - kept * least) / (len(scores) - least))
        for i in clusters
    ]


def voters_of(scorer: str, run: Decoding, window: int = SNAPKV_WINDOW) -> list[int]:
    """The positions that vote in a pass. ``window``: the last of the prompt that do,
    for ``snapkv``.
    """
    prompt, seen = len(run.prompt), len(run.seen)
    if scorer == "snapkv":
        return list(range(max(0, prompt - window), prompt))
    if not scorer.startswith("mask_voting"):
        return list(
            range({"all_voting": seen, "prompt_voting": prompt, "h2o": prompt}[scorer])
        )
    masks = run.masked(prompt, seen)
    if scorer == "mask_voting":
        return masks
    i = ["first", "second", "third", "last"].index(scorer.removeprefix("mask_voting_"))
    first = i * len(masks) // 4
    stop = (i + 1) * len(masks) // 4
    return masks[first:stop] or [masks[first]]


def votes_of(q: torch.Tensor, k: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Votes ``[KV heads, prompt]`` of queries ``[voters, heads, d]`` with the keys
    ``[canvas, KV heads, d]``.

    The sum over the queries of their attention to each prompt position, averaged over
    the query heads that share a KV head.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    votes = torch.zeros(kv_heads, prompt_length)
    for h in range(heads):
        votes[h * kv_heads // heads] += attention_weights(q, k, h).sum(0)[
            :prompt_length
        ] / (heads // kv_heads)
    return votes


def pooled(scores: Sequence[float], width: int) -> list[float]:
    """The highest score within ``width // 2`` places of each position."""
    reach = width // 2
    return [max(scores[max(i - reach, 0) : i + reach + 1]) for i in range(len(scores))]


def layer_budgets(average: int, profile: Sequence[float], *, beta: float) -> list[int]:
    """Algorithm 2."""
    num_layers, base = len(profile), math.floor(beta * average)
    if sum(profile) == 0:
        return [average] * num_layers
    boundary = {0, num_layers - 1}
    middle = {*range(num_layers)} - boundary
    boundary_score, middle_score = (
        sum(profile[layer] for layer in sorted(layers)) for layers in (boundary, middle)
    )
    pool = (average - base) * num_layers
    boundary_pool = math.floor(pool * boundary_score / (boundary_score + middle_score))
    pools = {layer: boundary_pool / len(boundary) for layer in boundary}
    pools |= {layer: (pool - boundary_pool) / len(middle) for layer in middle}
    return [math.floor(base + pools[layer]) for layer in range(num_layers)]


def head_shares(
    masses: Sequence[float], layer_budget: int, alpha: float
) -> list[float]:
    """The unrounded budget of each KV head: a base, and the pool in proportion to its
    mass of votes.
    """
    base = math.floor(alpha * layer_budget)
    pool = (layer_budget - base) * len(masses)
    return [base + pool * mass / sum(masses) for mass in masses]


def head_budgets(
    masses: Sequence[float],
    layer_budget: int,
    prompt_length: int,
    *,
    kind: str,
    alpha: float,
) -> list[int]:
    """Stage 2 of Algorithm 3: tokens per KV head from the heads' masses of votes.
    ``kind`` "uniform": no preference.
    """
    if kind == "uniform":
        return [min(layer_budget, prompt_length)] * len(masses)
    shares = head_shares(masses, layer_budget, alpha)
    return [min(prompt_length, math.floor(share)) for share in shares]


def adaptive_budgets(votes: torch.Tensor, layer_budget: int) -> list[int]:
    """Ada-KV: four fifths of the highest votes of all heads together, and a fifth of
    the layer's budget.
    """
    heads, length = votes.shape
    highest = votes.flatten().sort(descending=True, stable=True).indices[
        : layer_budget * heads
    ] // max(length, 1)
    return [
        min(length, (layer_budget + 4 * int((highest == head).sum())) // 5)
        for head in range(heads)
    ]


@dataclass
class MaskKVCache(AdaptiveCache):
    """Evicts after the first forward pass."""

    adapt_beside_prompt = False
    refresh_first_layer: bool = False
    kv_budget: int = 256
    retention_ratio: float = 1.0
    layer_budget: str = "boundary"
    beta: float = 0.4
    head_budget: str = "prompt_preference"
    alpha: float = 0.1
    scorer: str = "mask_voting"

    def __post_init__(self) -> None:
        super().__post_init__()
        run = self.run
        self.prompt_length, num_layers = len(run.prompt), len(run.model.layers)
        self.kv_budget = min(
            self.kv_budget, int(self.prompt_length * self.retention_ratio)
        )
        assert self.layer_budget in ("boundary", "uniform", "squeeze")
        if self.kv_budget >= self.prompt_length:
            self.budgets = [self.prompt_length] * num_layers
            self.head_budget = "uniform"
        elif self.layer_budget == "uniform":
            self.budgets = [self.kv_budget] * num_layers
        else:
            measured = importance(
                run.model, run.canvas, of_attention=self.layer_budget == "squeeze"
            )
            if self.layer_budget == "squeeze":
                self.budgets = squeeze(self.kv_budget, measured)
            else:
                self.budgets = layer_budgets(self.kv_budget, measured, beta=self.beta)
        self.pool_kernel_size = {"snapkv": 7}.get(self.scorer, 1)
        self.retained: list[list[list[int]]] = []
        run.traces["retained_per_head"] = [self.retained]

    def visible(self, number: int) -> list[list[int]] | None:
        if not self.run.order:
            return None
        return [
            kept + list(range(self.prompt_length, self.run.cut))
            for kept in self.retained[number]
        ]

    def after_layer(self, number: int, q: torch.Tensor) -> None:
        if not self.run.order:
            self.vote(number, q)
        for g, kept in enumerate(self.retained[number]):
            evicted = [
                position
                for position in range(self.prompt_length)
                if position not in kept
            ]
            self.buffer.k[number, evicted, g] = self.buffer.v[number, evicted, g] = (
                math.nan
            )

    def vote(self, number: int, q: torch.Tensor) -> None:
        keys = self.buffer.k[number]
        if (
            self.scorer == "mean_query"
        ):  # one query for each KV head, which looks at the prompt alone
            keys = keys[: self.prompt_length]
            of_block = q[slice(*self.run.window)].mean(0, keepdim=True)
            voters = of_block.unflatten(1, (keys.shape[1], -1)).mean(2)
        else:
            voters = q[voters_of(self.scorer, self.run)]
        votes = votes_of(voters, keys, self.prompt_length)
        masses = votes.double().sum(-1).tolist()
        budget = self.budgets[number]
        if self.head_budget == "adaptive":
            keep = adaptive_budgets(votes, budget)
            self.run.largest(
                dict(enumerate(votes.flatten().tolist())), budget * len(votes)
            )
        else:
            keep = head_budgets(
                masses,
                budget,
                self.prompt_length,
                kind=self.head_budget,
                alpha=self.alpha,
            )
        self.retained.append([])
        for g, count in enumerate(keep):
            recent = {"snapkv": min(SNAPKV_WINDOW, count), "h2o": count // 2}.get(
                self.scorer, 0
            )
            border = self.prompt_length - recent
            count = count - recent
            ranked = torch.tensor(
                pooled(votes[g, :border].tolist(), self.pool_kernel_size),
                dtype=torch.float64,
            )
            ordered, positions = ranked.sort(descending=True, stable=True)
            self.retained[-1].append(
                sorted(positions[:count].tolist())
                + list(range(border, self.prompt_length))
            )
            if 0 < count < len(ordered):
                last = ordered[count - 1]
                # Neighbours with the same maximum are equal in any arithmetic.
                others = (
                    ordered[ordered != last]
                    if self.pool_kernel_size > 1
                    else ordered[count:]
                )
                for margin in (1 - others / last).abs().tolist():
                    self.run.decided(10 * margin)
        if self.head_budget == "prompt_preference" and 0 < budget < self.prompt_length:
            for share in head_shares(masses, budget, self.alpha):
                self.run.decided(abs(share - round(share)))  # rounding down decides


def plain_maskkv(run: Decoding, **options: Any) -> None:
    """``kv_budget``: retained prompt tokens, the average per layer and KV head."""
    MaskKVCache(run, **options).decode()
