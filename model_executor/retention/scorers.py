"""Which tokens matter to which KV head of a layer. A new scorer is a function and its entry in ``SCORERS``.

Scores are of this rank's heads and never negative, so that a head's sum is how much it cares for the tokens as a whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from dllm_engine.kernels.noise import uniform
from dllm_engine.kernels.voting import voting_scores
from dllm_engine.model_executor.step_batch import Canvas
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.scheduler.step_plan import StepPlan

QUARTERS = ("first", "second", "third", "last")
"""Of the masked positions."""


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
    masked: np.ndarray
    """``[n]`` bool, on the host."""
    window: slice
    """Of the running blocks."""
    prompt_length: int
    seed: int
    layer: int
    first_kv_head: int
    """Number of this rank's first KV head in the model."""
    observation_window: int
    """Last prompt tokens whose queries vote (``snapkv``)."""
    voters: str = "all"
    """Which masked positions vote (``mask_voting``): all, or the quarter of that name."""

    @classmethod
    def of(
        cls,
        canvas: Canvas,
        plan: StepPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        lse: torch.Tensor | None,
        layer: int,
        total_kv_heads: int,
        observation_window: int,
        voters: str = "all",
    ) -> "ScoredLayer":
        """Layer ``layer`` of a request, from this rank's part of it."""
        world, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        return cls(
            q=q,
            k=k,
            lse=lse,
            masked=canvas.known[: q.shape[0]] < 0,
            window=slice(*plan.window),
            prompt_length=canvas.spec.prompt_length,
            seed=canvas.seed,
            layer=layer,
            # With more ranks than KV heads, neighbouring ranks hold the same head.
            first_kv_head=rank * total_kv_heads // world,
            observation_window=observation_window,
            voters=voters,
        )


class Scorer(NamedTuple):
    """How tokens are scored."""

    score: Callable[[ScoredLayer, torch.Tensor], torch.Tensor]
    """``score(layer, tokens)``: float32 ``[num_kv_heads, num_tokens]`` for canvas positions ``tokens``."""
    needs_lse: bool = True
    num_recent: Callable[[torch.Tensor, int], torch.Tensor] = lambda kept, window: torch.zeros_like(kept)
    """``num_recent(kept, observation_window)``: of the prompt tokens that each head of ``maskkv`` retains, how many are
    the last ones of the prompt, whatever they score."""
    pool_kernel_size: int = 1
    """Width of the max-pooling over the scores of the others, unless asked for."""


def mean_query(layer: ScoredLayer, tokens: torch.Tensor) -> torch.Tensor:
    """Sparse-dLLM's score per head: the window's mean query against each key, as a softmax over the tokens."""
    mean = layer.q[layer.window].float().mean(dim=0).unflatten(0, (layer.k.shape[1], -1)).mean(dim=1)
    raw = torch.einsum("gd,tgd->gt", mean, layer.k[tokens].float())
    return (raw / layer.q.shape[-1] ** 0.5).softmax(dim=-1)


def mask_voting(layer: ScoredLayer, tokens: torch.Tensor) -> torch.Tensor:
    """MaskKV: the attention that masked positions pay to each token: all, or a quarter of them (Table 11), which is one
    at least."""
    masks = np.flatnonzero(layer.masked)
    if layer.voters != "all":
        first, stop = ((QUARTERS.index(layer.voters) + end) * len(masks) // 4 for end in (0, 1))
        masks = masks[first : max(stop, first + 1)]
    return _votes(layer, on_device(masks, tokens.device), tokens)


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
    seed, number = (torch.full_like(tokens, value) for value in (layer.seed, layer.layer))
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
    "snapkv": Scorer(snapkv, num_recent=lambda kept, window: kept.clamp(max=window), pool_kernel_size=7),
    "h2o": Scorer(prompt_voting, num_recent=lambda kept, window: kept // 2),
    "random": Scorer(random, needs_lse=False),
}
