"""Votes of queries on keys, on CUDA devices."""

import math

import torch

import triton
import triton.language as tl

# The arguments of Triton kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs


@triton.jit(do_not_specialize=["num_pairs", "num_keys"])
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


def voting_scores(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    scores = k.new_empty(k.shape[1], k.shape[0], dtype=torch.float32)
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
        # Four would spill in float32 on GPUs of compute capability 8.6.
        num_warps=8 if q.dtype == torch.float32 else 4,
    )  # fmt: skip
    return scores
