r"""Choosing the tokens that a layer retains (Sparse-dLLM, Algorithms 3 and 4).

With the block's queries after RoPE, q_{i,h} for rows i of n, and candidates' keys k_{j,g}, where query head h reads KV
head g(h):

    score_j = Σ_h q̄_h · k_{j,g(h)},   q̄_h = (1/n) Σ_i q_{i,h}
            = Σ_g (Σ_{h: g(h)=g} q̄_h) · k_{j,g}

so the queries shrink to one vector of num_kv_heads · head_dim numbers, and scoring is one matrix-vector product. Scores
are max-pooled over the sequence of candidates, and the ``count`` highest are retained, in ascending order.
"""

import torch
import torch.nn.functional as F


def mean_query_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Attention of a block to each candidate, before any scale or softmax.

    The score is a sum over the heads of this rank. For the mean of Algorithm 3, tensor-parallel ranks add theirs and
    divide by the number of query heads of the whole model.

    Args:
        q: the block's queries, ``[num_queries, num_heads, head_dim]``.
        k: the candidates' keys, ``[num_candidates, num_kv_heads, head_dim]``.

    Returns:
        float32 ``[num_candidates]``.
    """
    mean = q.float().mean(dim=0)
    return k.flatten(1).float() @ mean.unflatten(0, (k.shape[1], -1)).sum(dim=1).flatten()


def top_indices(scores: torch.Tensor, count: int, *, in_order: bool = True) -> torch.Tensor:
    """Indices of the ``count`` largest scores of each row, largest first unless a CPU may give them in any order.

    Equal scores: on a GPU the first come first, because what ``torch.topk`` takes there depends on the sizes. On a CPU
    ``torch.topk`` decides: the outputs of the authors' code, which the tests compare with, come from CPUs.

    Args:
        scores: ``[..., num_scores]``.

    Returns:
        int64 ``[..., count]``.
    """
    if scores.is_cuda:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return scores.topk(count, sorted=in_order).indices


def max_pooled(scores: torch.Tensor, width: int) -> torch.Tensor:
    """Scores ``[rows, tokens]`` where each token counts as the best within ``width // 2`` places; ``width`` is odd."""
    return scores if width == 1 else F.max_pool1d(scores, width, stride=1, padding=width // 2)


def select_retained(scores: torch.Tensor, count: int, pool_kernel_size: int) -> torch.Tensor:
    """The candidates to retain, of one request or of several.

    Pooling makes neighbours equal, so the last place is often a tie, which ``top_indices`` decides.

    Args:
        scores: ``[num_candidates]`` or ``[num_requests, num_candidates]``.
        count: how many to retain of each request.
        pool_kernel_size: odd; each candidate counts as the best within ``pool_kernel_size // 2`` places. 1: itself.

    Returns:
        int64 ``[count]`` or ``[num_requests, count]``, ascending.
    """
    if count:
        scores = max_pooled(scores.view(-1, scores.shape[-1]), pool_kernel_size).view(scores.shape)
    return top_indices(scores, count).sort().values
