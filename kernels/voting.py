r"""How much the mask tokens attend to each key (mask voting of MaskKV, arXiv 2510.09309, equation 6).

With the queries q_{i,h} of the voters, head h reading KV head g(h), and lse_{i,h} = log Σ_j exp(s_{ij,h}) over **all**
keys of the voter's sequence, of which those voted on are a part:

    score_{g,j} = (1/|{h: g(h)=g}|) Σ_{h: g(h)=g} Σ_i exp(s_{ij,h} − lse_{i,h}),   s_{ij,h} = q_{i,h} · k_{j,g} / √d

The pseudo-code of the paper takes the softmax over the prompt's keys alone; its equation 6 and its text take it over
the whole sequence, and so does this. Attention has computed the denominators already, which leaves one pass over tiles
of the scores: the matrix of attention is never held whole.
"""

import math

import torch

from dllm_engine.kernels._operator import operator
from dllm_engine.kernels._triton import jit, tl, triton

# The arguments of Triton kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

_KEYS_PER_TILE = 1024
_PAIRS_PER_TILE = 1024
"""Keys, and (voter, query head) pairs, that the CPU holds scores of at once: 4 MiB."""


@jit
def _voting_kernel(
    q, k, lse, scores, num_pairs, num_keys, q_row, q_head, k_row, k_head, lse_row, lse_head,
    scale: tl.constexpr,
    SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a tile of a KV head's keys, over all (voter, query head) pairs that share the head.

    ``scale`` includes log2(e), so that exponentials are powers of two.
    """
    kv_head = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    dim = tl.arange(0, BLOCK_D)
    exists = key < num_keys
    in_head = dim < HEAD_DIM
    keys = tl.load(
        k + key.to(tl.int64)[None, :] * k_row + kv_head * k_head + dim[:, None],
        mask=exists[None, :] & in_head[:, None],
        other=0.0,
    )
    total = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, num_pairs, BLOCK_P):
        pair = first + tl.arange(0, BLOCK_P)
        votes = pair < num_pairs
        voter = (pair // SHARING).to(tl.int64)
        head = kv_head * SHARING + pair % SHARING
        queries = tl.load(
            q + voter[:, None] * q_row + head[:, None] * q_head + dim[None, :],
            mask=votes[:, None] & in_head[None, :],
            other=0.0,
        )
        # An infinite denominator gives the pairs beyond the last a vote of 0.
        denominators = tl.load(lse + voter * lse_row + head * lse_head, mask=votes, other=float("inf"))
        # float32 products in full precision: TF32 would lose what float32 was asked for.
        powers = tl.dot(queries, keys, input_precision="ieee") * scale - denominators[:, None] * 1.4426950408889634
        total += tl.sum(tl.exp2(powers), axis=0)
    tl.store(scores + kv_head * num_keys + key, total / SHARING, mask=exists)


@operator("voting_scores")
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
    _check(q, k, lse)
    scores = _empty_scores(k).zero_()
    sharing = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5
    # One buffer for all tiles: a fresh one each time would be handed back to the system and faulted in again.
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


@voting_scores.register_kernel("CUDA")
def voting_scores_with_triton(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    _check(q, k, lse)
    scores = _empty_scores(k)
    num_voters, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    if not num_voters or not num_keys:
        return scores.zero_()
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    sharing = num_heads // num_kv_heads
    # At most 96 KiB of shared memory, which every GPU since 2020 has.
    block = 64 if q.dtype != torch.float32 and head_dim <= 128 else 32
    _voting_kernel[triton.cdiv(num_keys, block), num_kv_heads](
        q, k, lse, scores, num_voters * sharing, num_keys, *q.stride()[:2], *k.stride()[:2], *lse.stride(),
        scale=head_dim**-0.5 * math.log2(math.e),
        SHARING=sharing,
        HEAD_DIM=head_dim,
        BLOCK_P=block,
        BLOCK_K=block,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_stages=1 if q.dtype == torch.float32 else 2,
    )  # fmt: skip
    return scores


@voting_scores.register_fake
def _(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    _check(q, k, lse)
    return _empty_scores(k)


def voting_scores_reference(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The formula, in float64."""
    sharing = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(sharing, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q.double(), keys) * q.shape[2] ** -0.5
    votes = (scores - lse.double().T[:, :, None]).exp().sum(dim=1)
    return votes.unflatten(0, (k.shape[1], sharing)).mean(dim=1)


def _empty_scores(k: torch.Tensor) -> torch.Tensor:
    return k.new_empty(k.shape[1], k.shape[0], dtype=torch.float32)


def _check(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> None:
    if q.dim() != 3 or k.dim() != 3 or q.shape[2] != k.shape[2] or q.dtype != k.dtype:
        raise ValueError(f"q {list(q.shape)} {q.dtype} and k {list(k.shape)} {k.dtype} do not belong together")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads")
    if lse.shape != q.shape[:2] or lse.dtype != torch.float32:
        raise ValueError(f"lse {list(lse.shape)} {lse.dtype} is not float32 {list(q.shape[:2])}, as q has it")
