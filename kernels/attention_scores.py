r"""Scores of tokens by the attention that they get, and the choice of the highest.

Sparse-dLLM (Algorithms 3 and 4) scores candidates. With the block's queries after RoPE,
q_{i,h} for rows i of n, and candidates' keys k_{j,g}, where query head h reads KV head
g(h):

    score_j = Σ_h q̄_h · k_{j,g(h)},   q̄_h = (1/n) Σ_i q_{i,h}
            = Σ_g (Σ_{h: g(h)=g} q̄_h) · k_{j,g}

so the queries shrink to one vector of num_kv_heads · head_dim numbers, and scoring is
one matrix-vector product. Scores are max-pooled over the sequence of candidates, and
the ``count`` highest are retained, in ascending order.

In MaskKV (arXiv 2510.09309, equation 6) mask tokens vote for keys by their attention.
With the voters' queries q_{i,h}, and lse_{i,h} = log Σ_j exp(s_{ij,h}) over **all**
keys of the voter's sequence (the keys voted on are some of them):

    score_{g,j} = (1/|{h: g(h)=g}|) Σ_{h: g(h)=g} Σ_i exp(s_{ij,h} − lse_{i,h}),
    s_{ij,h} = q_{i,h} · k_{j,g} / √d

The paper's pseudo-code takes the softmax over the prompt's keys alone; its equation 6
and its text take it over the whole sequence, and so does this code. Attention has
already computed the denominators, so one pass over tiles of the scores is enough on a
GPU. A CPU holds the scores of one KV head at a time.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_engine.kernels._operator import Operator


def mean_query_scores(q: Tensor, k: Tensor) -> Tensor:
    """Attention of a block to each candidate, before any scale or softmax, float32
    ``[num_candidates]``, from the block's queries ``q`` ``[num_queries, num_heads,
    head_dim]`` and ``k`` ``[num_candidates, num_kv_heads, head_dim]``.

    It is a sum over the heads of this rank. For the mean of Algorithm 3,
    tensor-parallel ranks add their sums and divide by the number of query heads of the
    whole model.
    """
    mean = q.float().mean(dim=0)
    # Query heads that share a KV head read the same keys.
    shared = mean.unflatten(0, (k.shape[1], -1)).sum(dim=1)
    return k.flatten(1).float() @ shared.flatten()


def top_indices(scores: Tensor, count: int, *, in_order: bool = True) -> Tensor:
    """Indices of the ``count`` largest scores of each row ``[..., num_scores]``, int64
    ``[..., count]``. The largest comes first, unless ``in_order`` is False on a CPU.

    Ties: on a GPU the first of equal scores wins, because the choice of ``torch.topk``
    depends on the sizes there. On a CPU ``torch.topk`` decides, because the tests
    compare with outputs of the authors' code on CPUs.
    """
    if scores.is_cuda:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return scores.topk(count, sorted=in_order).indices


def max_pooled(scores: Tensor, width: int) -> Tensor:
    """Max-pooled scores ``[rows, tokens]``: each token gets the best score within
    ``width // 2`` places. ``width`` is odd.
    """
    return (
        scores
        if width == 1
        else F.max_pool1d(scores, width, stride=1, padding=width // 2)
    )


def select_retained(scores: Tensor, count: int, pool_kernel_size: int) -> Tensor:
    """The ``count`` candidates to retain, ascending, int64 ``[count]`` or
    ``[num_requests, count]``, from scores ``[num_candidates]`` or ``[num_requests,
    num_candidates]``, which ``max_pooled`` pools first.

    Pooling makes neighbours equal, so there is often a tie for the last place.
    ``top_indices`` decides it.
    """
    if count:
        scores = max_pooled(scores.view(-1, scores.shape[-1]), pool_kernel_size).view(
            scores.shape
        )
    return top_indices(scores, count).sort().values


@Operator
def voting_scores(q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
    """The attention each key gets from the voters, summed over them and averaged over
    the query heads of a KV head; float32 ``[num_kv_heads, num_keys]``, zeros where
    nobody votes.

    Args:
        q: the queries that vote, after RoPE, ``[num_voters, num_heads, head_dim]``.
        k: the keys voted on, ``[num_keys, num_kv_heads, head_dim]``; float32, float16
            or bfloat16 like ``q``.
        lse: finite, as ``paged_attention`` returns it; float32 ``[num_voters,
            num_heads]``.
    """
    return torch.stack(
        [p.sum(dim=(0, 1)) / p.shape[1] for p in _probabilities(q, k, lse)]
    )


class KeysInPages(NamedTuple):
    """Keys that requests have in pages, in one layer. Fields are those of
    ``PagedTokens``, token-major.
    """

    k_pages: Tensor
    page_tables: Tensor
    head_len: Tensor


@Operator
def summed_probabilities(
    q: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    keys: KeysInPages,
    num_rows: int,
    num_tokens: int,
) -> Tensor:
    """The attention of each row to each token that its request has in pages, summed
    over the query heads: Σ_h exp(s_{ij,h} − lse_{i,h}), float32 ``[num_requests,
    num_rows, num_tokens]``; zeros behind a request's rows and tokens.

    Args:
        q, lse: as for ``voting_scores``; ``lse`` contiguous.
        cu_seqlens: first row of each request and, last, where rows end; int32
            ``[num_requests + 1]``.
        num_rows, num_tokens: upper bounds of the rows and tokens of a request.
    """
    k_pages, page_tables, head_len = keys
    num_requests, num_kv_heads = head_len.shape
    total = q.new_zeros(num_requests, num_rows, num_tokens, dtype=torch.float32)
    pages = k_pages.unflatten(1, (-1, num_kv_heads))
    for request, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        tokens = torch.arange(int(head_len[request, 0]))
        numbers = tokens // pages.shape[1]
        places = tokens % pages.shape[1]
        request_keys = pages[page_tables[request, numbers], places]
        for probabilities in _probabilities(
            q[start:stop], request_keys, lse[start:stop]
        ):
            total[request, : stop - start, : len(tokens)] += probabilities.sum(dim=1)
    return total


def _probabilities(q: Tensor, k: Tensor, lse: Tensor) -> Iterator[Tensor]:
    """exp(s_{ij,h} − lse_{i,h}) of the heads that read each KV head, ``[num_rows,
    heads, num_keys]``.
    """
    queries = q.float().unflatten(1, (k.shape[1], -1))
    scale = q.shape[2] ** -0.5
    denominators = lse.unflatten(1, (k.shape[1], -1))
    for head in range(k.shape[1]):
        scores = queries[:, head] @ k[:, head].float().T * scale
        yield scores.sub_(denominators[:, head, :, None]).exp_()
