r"""Attention of the mask tokens to each key (mask voting of MaskKV, arXiv 2510.09309, equation 6).

With the queries q_{i,h} of the voters, head h reading KV head g(h), and lse_{i,h} = log Σ_j exp(s_{ij,h}) over **all**
keys of the voter's sequence, of which those voted on are a part:

    score_{g,j} = (1/|{h: g(h)=g}|) Σ_{h: g(h)=g} Σ_i exp(s_{ij,h} − lse_{i,h}),   s_{ij,h} = q_{i,h} · k_{j,g} / √d

The paper's pseudo-code takes the softmax over the prompt's keys alone; its equation 6 and its text take it over the
whole sequence, as this does. Attention has already computed the denominators, so one pass over tiles of the scores is
enough on a GPU; a CPU holds those of one KV head.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

from dllm_engine.kernels._operator import Operator


@Operator
def voting_scores(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The attention each key gets from the voters, summed over them and averaged over the query heads of a KV head.

    Args:
        q: the queries that vote, after RoPE, ``[num_voters, num_heads, head_dim]``.
        k: the keys voted on, ``[num_keys, num_kv_heads, head_dim]``; float32, float16 or bfloat16 like ``q``.
        lse: natural logarithm of each softmax's denominator over all keys of the voter's sequence, finite, as
            ``paged_attention`` returns it; float32 ``[num_voters, num_heads]``.

    Returns:
        float32 ``[num_kv_heads, num_keys]``; zeros where nobody votes.
    """
    return torch.stack([p.sum(dim=(0, 1)) / p.shape[1] for p in _probabilities(q, k, lse)])


@Operator
def summed_probabilities(
    q: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    k_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_len: torch.Tensor,
    num_rows: int,
    num_tokens: int,
) -> torch.Tensor:
    """The attention of each row to each token that its request has in pages, summed over the query heads:
    Σ_h exp(s_{ij,h} − lse_{i,h}).

    Args:
        q, lse: as of ``voting_scores``; ``lse`` contiguous.
        cu_seqlens: first row of each request and, last, where rows end; int32 ``[num_requests + 1]``.
        k_pages, page_tables, head_len: as of ``PagedTokens``, token-major.
        num_rows, num_tokens: upper bounds of a request's.

    Returns:
        float32 ``[num_requests, num_rows, num_tokens]``; zeros behind a request's rows and tokens.
    """
    num_requests, num_kv_heads = head_len.shape
    total = q.new_zeros(num_requests, num_rows, num_tokens, dtype=torch.float32)
    pages = k_pages.unflatten(1, (-1, num_kv_heads))
    for request, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        tokens = torch.arange(int(head_len[request, 0]))
        keys = pages[page_tables[request, tokens // pages.shape[1]], tokens % pages.shape[1]]
        for probabilities in _probabilities(q[start:stop], keys, lse[start:stop]):
            total[request, : stop - start, : len(tokens)] += probabilities.sum(dim=1)
    return total


def _probabilities(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> Iterator[torch.Tensor]:
    """exp(s_{ij,h} − lse_{i,h}) of the heads that read each KV head, ``[num_rows, heads, num_keys]``."""
    queries, scale = q.float().unflatten(1, (k.shape[1], -1)), q.shape[2] ** -0.5
    denominators = lse.unflatten(1, (k.shape[1], -1))
    for head in range(k.shape[1]):
        scores = queries[:, head] @ k[:, head].float().T * scale
        yield scores.sub_(denominators[:, head, :, None]).exp_()
