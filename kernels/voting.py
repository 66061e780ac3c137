r"""How much the mask tokens attend to each key (mask voting of MaskKV, arXiv 2510.09309, equation 6).

With the queries q_{i,h} of the voters, head h reading KV head g(h), and lse_{i,h} = log Σ_j exp(s_{ij,h}) over **all**
keys of the voter's sequence, of which those voted on are a part:

    score_{g,j} = (1/|{h: g(h)=g}|) Σ_{h: g(h)=g} Σ_i exp(s_{ij,h} − lse_{i,h}),   s_{ij,h} = q_{i,h} · k_{j,g} / √d

The paper's pseudo-code takes the softmax over the prompt's keys alone; its equation 6 and its text take it over the
whole sequence, as this does. Attention has already computed the denominators, so one pass over tiles of the scores is
enough, and the attention matrix is never held whole.
"""

import torch

from dllm_engine.kernels._operator import operator

_KEYS_PER_TILE = 1024
_PAIRS_PER_TILE = 1024
"""Keys, and pairs of voter and query head, whose scores the CPU holds at once: 4 MiB."""


@operator("voting:voting_scores")
def voting_scores(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The attention each key gets from the voters, summed over them and averaged over the query heads of a KV head.

    Args:
        q: the queries that vote, after RoPE, ``[num_voters, num_heads, head_dim]``.
        k: the keys voted on, ``[num_keys, num_kv_heads, head_dim]``; float32, float16 or bfloat16 like ``q``.
        lse: natural logarithm of each softmax's denominator over all keys of the voter's sequence, finite, as
            ``paged_attention`` returns it; float32 ``[num_voters, num_heads]``.

    Returns:
        float32 ``[num_kv_heads, num_keys]``; zeros where nobody votes.

    Raises:
        ValueError: shapes or types that do not belong together.
    """
    scores = k.new_zeros(k.shape[1], k.shape[0], dtype=torch.float32)
    sharing = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5
    # One buffer for all tiles: a new one for each would be returned to the system and page-faulted in again.
    buffer = scores.new_empty(min(_PAIRS_PER_TILE, q.shape[0] * sharing), min(_KEYS_PER_TILE, k.shape[0]))
    for kv_head, of_head in enumerate(scores):
        heads = slice(kv_head * sharing, (kv_head + 1) * sharing)
        queries = (q[:, heads].float() * scale).flatten(0, 1).split(_PAIRS_PER_TILE)
        denominators = lse[:, heads].flatten()[:, None].neg().split(_PAIRS_PER_TILE)
        key_tiles = zip(k[:, kv_head].split(_KEYS_PER_TILE), of_head.split(_KEYS_PER_TILE), strict=True)
        for keys, total in key_tiles:
            transposed = keys.float().T
            for of_pairs, minus_lse in zip(queries, denominators, strict=True):
                tile = buffer[: len(of_pairs), : len(keys)]
                torch.addmm(minus_lse, of_pairs, transposed, out=tile)
                total += tile.exp_().sum(dim=0)
    return scores.div_(sharing)


_PROBABILITIES_AT_ONCE = 1 << 24
"""Of some heads, that the plain kernel holds: 64 MiB."""


@operator("voting:summed_probabilities")
def summed_probabilities(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The attention of each row to each key, summed over the query heads: Σ_h exp(s_{ij,h} − lse_{i,h}).

    Arguments and errors are those of ``voting_scores``.

    Returns:
        float32 ``[num_rows, num_keys]``.
    """
    # A few heads at a time, or one KV head's where these are more than fit.
    num_rows, sharing = q.shape[0], q.shape[1] // k.shape[1]
    total = q.new_zeros(num_rows, k.shape[0], dtype=torch.float32)
    # Query heads that share a KV head are further rows of it.
    queries = (q.float() * q.shape[2] ** -0.5).unflatten(1, (-1, sharing)).permute(1, 2, 0, 3).flatten(1, 2)
    minus_lse = lse.neg().unflatten(1, (-1, sharing)).permute(1, 2, 0).flatten(1, 2)[..., None]
    heads = max(1, _PROBABILITIES_AT_ONCE // max(sharing * total.numel(), 1))
    parts = (queries.split(heads), k.float().permute(1, 2, 0).split(heads), minus_lse.split(heads))
    for of_queries, keys, of_lse in zip(*parts, strict=True):
        probabilities = torch.baddbmm(of_lse, of_queries, keys).exp_()
        total += probabilities.unflatten(1, (sharing, num_rows)).sum(dim=(0, 1))
    return total


@summed_probabilities.register_check
@voting_scores.register_check
def _(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> None:
    if q.dim() != 3 or k.dim() != 3 or q.shape[2] != k.shape[2] or q.dtype != k.dtype:
        raise ValueError(f"q {list(q.shape)} {q.dtype} and k {list(k.shape)} {k.dtype} do not belong together")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads")
    if lse.shape != q.shape[:2] or lse.dtype != torch.float32:
        raise ValueError(f"lse {list(lse.shape)} {lse.dtype} is not float32 {list(q.shape[:2])}, as q has it")
