"""Votes of queries on keys, and attention summed over heads, on CUDA devices."""

import math
from typing import Any

import torch

import triton
import triton.language as tl


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


@triton.jit(do_not_specialize=["num_rows", "num_keys", "num_kv_heads"])
def _summed_probabilities_kernel(
    q, k, lse, sums, num_rows, num_keys, num_kv_heads, q_row, q_head, k_row, k_head, lse_row, lse_head,
    scale: tl.constexpr,
    SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a tile of keys and a tile of rows, over all heads."""
    key = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = (tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    is_key = key < num_keys
    is_row = row < num_rows
    in_head = dim < HEAD_DIM
    total = tl.zeros([BLOCK_P, BLOCK_K], tl.float32)
    for head in range(num_kv_heads * SHARING):
        keys = tl.load(
            k + key.to(tl.int64)[None, :] * k_row + (head // SHARING) * k_head + dim[:, None],
            mask=is_key[None, :] & in_head[:, None],
            other=0.0,
        )
        queries = tl.load(
            q + row[:, None] * q_row + head * q_head + dim[None, :], mask=is_row[:, None] & in_head[None, :], other=0.0
        )
        denominators = tl.load(lse + row * lse_row + head * lse_head, mask=is_row, other=float("inf"))
        powers = tl.dot(queries, keys, input_precision="ieee") * scale - denominators[:, None] * 1.4426950408889634
        total += tl.exp2(powers)
    at = row[:, None] * num_keys + key[None, :]
    tl.store(sums + at, total, mask=is_row[:, None] & is_key[None, :])


def voting_scores(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    scores = k.new_empty(k.shape[1], k.shape[0], dtype=torch.float32)
    num_voters, (num_keys, num_kv_heads, _) = q.shape[0], k.shape
    if not num_voters or not num_keys:
        return scores.zero_()
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    constants = _constants(q, num_kv_heads)
    num_pairs = num_voters * constants["SHARING"]
    _voting_kernel[triton.cdiv(num_keys, constants["BLOCK_K"]), num_kv_heads](
        q, k, lse, scores, num_pairs, num_keys, *q.stride()[:2], *k.stride()[:2], *lse.stride(), **constants
    )
    return scores


def summed_probabilities(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    num_rows, num_keys, num_kv_heads = q.shape[0], *k.shape[:2]
    sums = q.new_empty(num_rows, num_keys, dtype=torch.float32)
    if sums.numel():
        q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
        constants = _constants(q, num_kv_heads)
        grid = triton.cdiv(num_keys, constants["BLOCK_K"]), triton.cdiv(num_rows, constants["BLOCK_P"])
        _summed_probabilities_kernel[grid](
            q, k, lse, sums, num_rows, num_keys, num_kv_heads, *q.stride()[:2], *k.stride()[:2], *lse.stride(),
            **constants,
        )  # fmt: skip
    return sums


def _constants(q: torch.Tensor, num_kv_heads: int) -> dict[str, Any]:
    """Constants of both kernels, and how they are compiled."""
    _, num_heads, head_dim = q.shape
    wide = q.dtype == torch.float32
    # At most 96 KiB of shared memory, which every GPU since 2020 has.
    block = 64 if not wide and head_dim <= 128 else 32
    return {
        "scale": head_dim**-0.5 * math.log2(math.e),
        "SHARING": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_P": block,
        "BLOCK_K": block,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "num_stages": 1 if wide else 2,
        # Four would spill in float32 on GPUs of compute capability 8.6.
        "num_warps": 8 if wide else 4,
    }
