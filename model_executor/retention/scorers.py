"""Scores of tokens for each KV head of a layer. A new scorer is a function and its entry in ``SCORERS``.

Scores cover this rank's heads and are never negative, so that their sum is a head's interest in all tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from dllm_engine.kernels.eviction import voting_scores
from dllm_engine.kernels.noise import uniform
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.scheduler.request import Span

SNAPKV_WINDOW = 32
"""Last prompt tokens whose queries vote (``snapkv``)."""
QUARTERS = ("first", "second", "third", "last")
"""Names of the quarters of the masked positions (MaskKV, Table 11)."""


@dataclass(frozen=True)
class ScoredLayer:
    """One layer of one request in a forward pass, which to be scored must compute its canvas from position 0: all
    ``n`` positions of it, or those that ``suffix_blocks`` leaves."""

    q: torch.Tensor
    """``[n, num_heads, head_dim]``, after RoPE."""
    k: torch.Tensor
    """``[n, num_kv_heads, head_dim]``, after RoPE."""
    lse: torch.Tensor | None
    """float32 ``[n, num_heads]``: logarithm of each softmax's denominator; for scorers that need it."""
    canvas: Canvas
    window: Span
    """Canvas positions of the running blocks."""
    layer: int
    first_kv_head: int
    """Number of this rank's first KV head in the model."""
    observation_window: int = SNAPKV_WINDOW
    """Last prompt tokens whose queries vote (``snapkv``)."""

    @property
    def prompt_length(self) -> int:
        return self.canvas.spec.prompt_length

    @property
    def masked(self) -> np.ndarray:
        """The masked positions that the layer computes, ascending; int64, on the host."""
        return np.flatnonzero(self.canvas.known[: self.q.shape[0]] < 0)


class Scorer(NamedTuple):
    """A score of tokens, and its needs."""

    score: Callable[[ScoredLayer, torch.Tensor], torch.Tensor]
    """``score(layer, tokens)``: float32 ``[num_kv_heads, num_tokens]`` for canvas positions ``tokens``."""
    needs_lse: bool = True
    num_recent: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like
    """``num_recent(kept)``: how many of the ``kept`` tokens of a head of ``maskkv`` are the last ones of the prompt,
    whatever they score."""
    pool_kernel_size: int = 1
    """Width of the max-pooling over the scores of the other tokens in ``maskkv``."""


def mean_query(layer: ScoredLayer, tokens: torch.Tensor) -> torch.Tensor:
    """Sparse-dLLM's score per head: the window's mean query against each key, as a softmax over the tokens."""
    mean = layer.q[slice(*layer.window)].float().mean(dim=0).unflatten(0, (layer.k.shape[1], -1)).mean(dim=1)
    raw = torch.einsum("gd,tgd->gt", mean, layer.k[tokens].float())
    return (raw / layer.q.shape[-1] ** 0.5).softmax(dim=-1)


def mask_voting(layer: ScoredLayer, tokens: torch.Tensor) -> torch.Tensor:
    """MaskKV: the attention that all masked positions pay to each token."""
    return _votes(layer, on_device(layer.masked, tokens.device), tokens)


def quarter_voting(quarter: int, layer: ScoredLayer, tokens: torch.Tensor) -> torch.Tensor:
    """The attention that a quarter of the masked positions, one at least, pays to each token (MaskKV, Table 11)."""
    first, stop = ((quarter + end) * len(layer.masked) // 4 for end in (0, 1))
    return _votes(layer, on_device(layer.masked[first : max(stop, first + 1)], tokens.device), tokens)


def all_voting(layer: ScoredLayer, tokens: torch.Tensor) -> torch.Tensor:
    """The attention that all computed positions pay to each token (MaskKV, Table 13)."""
    return _votes(layer, torch.arange(layer.q.shape[0], device=tokens.device), tokens)


def prompt_voting(layer: ScoredLayer, tokens: torch.Tensor) -> torch.Tensor:
    """The attention that the prompt pays to each token (MaskKV, Table 13). By it H2O (arXiv 2306.14048) chooses its
    heavy hitters, here of a model whose attention is not causal."""
    return _votes(layer, torch.arange(layer.prompt_length, device=tokens.device), tokens)


def snapkv(layer: ScoredLayer, tokens: torch.Tensor) -> torch.Tensor:
    """SnapKV (arXiv 2404.14469): the attention that the last prompt tokens pay to each token."""
    first = max(layer.prompt_length - layer.observation_window, 0)
    return _votes(layer, torch.arange(first, layer.prompt_length, device=tokens.device), tokens)


def random(layer: ScoredLayer, tokens: torch.Tensor) -> torch.Tensor:
    """Noise, to compare with: the same for the same request seed, layer, head and position."""
    heads = torch.arange(layer.k.shape[1], device=tokens.device)[:, None] + layer.first_kv_head
    seed, number = (torch.full_like(tokens, value) for value in (layer.canvas.seed, layer.layer))
    return uniform(seed[None], number[None], tokens[None], heads).float()


def _votes(layer: ScoredLayer, voters: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    assert layer.lse is not None
    return voting_scores(layer.q[voters], layer.k[tokens], layer.lse[voters])


SCORERS: dict[str, Scorer] = {
    "mean_query": Scorer(mean_query, needs_lse=False),
    "mask_voting": Scorer(mask_voting),
    "all_voting": Scorer(all_voting),
    "prompt_voting": Scorer(prompt_voting),
    # The width that its paper has for LongBench.
    "snapkv": Scorer(snapkv, num_recent=lambda kept: kept.clamp(max=SNAPKV_WINDOW), pool_kernel_size=7),
    "h2o": Scorer(prompt_voting, num_recent=lambda kept: kept // 2),
    "random": Scorer(random, needs_lse=False),
} | {f"mask_voting_{name}": Scorer(partial(quarter_voting, i)) for i, name in enumerate(QUARTERS)}
