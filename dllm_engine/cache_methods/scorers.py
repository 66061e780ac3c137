"""Scores of tokens for each KV head of a layer. A new scorer is a function and its
entry in ``SCORERS``.

Scores cover this rank's heads and are never negative, so that their sum measures a
head's interest in all tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.kernels.attention_scores import voting_scores
from dllm_engine.kernels.sampling import uniform
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.step_batch import Rows
from dllm_engine.model_executor.transfer import on_device

SNAPKV_WINDOW = 32
"""Last prompt tokens whose queries vote (``snapkv``)."""
QUARTERS = ("first", "second", "third", "last")
"""Names of the quarters of the masked positions (MaskKV, Table 11)."""


@dataclass(frozen=True)
class ScoredLayer:
    """One layer of one request in a forward pass. The pass must compute the canvas from
    position 0: all ``n`` positions, or the positions that ``suffix_blocks`` leaves."""

    q: Tensor
    """``[n, num_heads, head_dim]``, after RoPE."""
    k: Tensor
    """``[n, num_kv_heads, head_dim]``, after RoPE."""
    lse: Tensor
    """float32 ``[n, num_heads]``: logarithm of each softmax's denominator."""
    canvas: Canvas
    window: Span
    """Canvas positions of the running blocks."""
    layer: int
    first_kv_head: int
    """Index of this rank's first KV head in the model."""
    observation_window: int = SNAPKV_WINDOW
    """Last prompt tokens whose queries vote (``snapkv``)."""


class Scorer(NamedTuple):
    """A score of tokens, and its use by a head with a budget."""

    score: Callable[[ScoredLayer, Tensor], Tensor]
    """``score(layer, tokens)``: float32 ``[num_kv_heads, num_tokens]`` for canvas
    positions ``tokens``.
    """
    num_recent: Callable[[Tensor], Tensor] = torch.zeros_like
    """``num_recent(kept)``: number of the last prompt tokens that a head with a budget
    always retains, among its ``kept`` tokens."""
    pool_kernel_size: int = 1
    """Width of the max-pooling over the scores of all other tokens, for heads with a
    budget.
    """


def mean_query(layer: ScoredLayer, tokens: Tensor) -> Tensor:
    """Sparse-dLLM's score per head: softmax over the tokens of the window's mean query
    with each key.
    """
    mean = (
        layer.q[slice(*layer.window)]
        .float()
        .mean(dim=0)
        .unflatten(0, (layer.k.shape[1], -1))
        .mean(dim=1)
    )
    raw = torch.einsum("gd,tgd->gt", mean, layer.k[tokens].float())
    return (raw / layer.q.shape[-1] ** 0.5).softmax(dim=-1)


def votes(
    voters: Callable[[ScoredLayer], Rows], layer: ScoredLayer, tokens: Tensor
) -> Tensor:
    """Attention that each token gets from the ``voters``, which are some of the
    computed positions.
    """
    rows = voters(layer)
    return voting_scores(layer.q[rows], layer.k[tokens], layer.lse[rows])


def masked_voters(first_quarter: int, stop_quarter: int, layer: ScoredLayer) -> Rows:
    """Some quarters of the masked positions that the layer computes, in order; at least
    one position (MaskKV: all quarters; Table 11: one quarter)."""
    positions = np.flatnonzero(layer.canvas.known[: layer.q.shape[0]] < 0)
    first, stop = (
        quarter * len(positions) // 4 for quarter in (first_quarter, stop_quarter)
    )
    return on_device(positions[first : max(stop, first + 1)], layer.q.device)


def last_prompt_voters(layer: ScoredLayer) -> Rows:
    """The last prompt tokens (SnapKV, arXiv 2404.14469)."""
    length = layer.canvas.layout.prompt_length
    return slice(max(length - layer.observation_window, 0), length)


def prompt_voters(layer: ScoredLayer) -> Rows:
    """The prompt (MaskKV, Table 13). H2O (arXiv 2306.14048) chooses its heavy hitters
    by these votes, with causal attention."""
    return slice(layer.canvas.layout.prompt_length)


def random(layer: ScoredLayer, tokens: Tensor) -> Tensor:
    """Noise as a baseline, which depends only on the request's seed, layer, head and
    position.
    """
    heads = (
        torch.arange(layer.k.shape[1], device=tokens.device)[:, None]
        + layer.first_kv_head
    )
    seed, number = (
        torch.full_like(tokens, value) for value in (layer.canvas.seed, layer.layer)
    )
    return uniform(seed[None], number[None], tokens[None], heads).float()


SCORERS: dict[str, Scorer] = {
    "mean_query": Scorer(mean_query),
    "mask_voting": Scorer(partial(votes, partial(masked_voters, 0, 4))),
    "all_voting": Scorer(partial(votes, lambda layer: slice(None))),
    "prompt_voting": Scorer(partial(votes, prompt_voters)),
    # The width in SnapKV's paper for LongBench.
    "snapkv": Scorer(
        partial(votes, last_prompt_voters),
        num_recent=lambda kept: kept.clamp(max=SNAPKV_WINDOW),
        pool_kernel_size=7,
    ),
    "h2o": Scorer(partial(votes, prompt_voters), num_recent=lambda kept: kept // 2),
    "random": Scorer(random),
} | {
    f"mask_voting_{name}": Scorer(partial(votes, partial(masked_voters, i, i + 1)))
    for i, name in enumerate(QUARTERS)
}
