"""Votes of queries on keys, and attention summed over heads, on CUDA devices."""

import math

import torch

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs", "num_keys"])
def _voting_kernel(
    q,
    k,
    lse,
    scores,
    num_pairs,
    num_keys,
    q_row,
    q_head,
    k_row,
    k_head,
    lse_row,
    lse_head,
    scale: tl.constexpr,
    SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: a tile of a KV head's keys, over all (voter, query head) pairs that
    share the head.

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
        denominators = tl.load(
            lse + voter * lse_row + head * lse_head, mask=votes, other=float("inf")
        )
        # float32 products in full precision: with TF32, float32 would gain nothing.
        powers = (
            tl.dot(queries, keys, input_precision="ieee") * scale
            - denominators[:, None] * 1.4426950408889634
        )
        total += tl.sum(tl.exp2(powers), axis=0)
    tl.store(scores + kv_head * num_keys + key, total / SHARING, mask=exists)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_tokens",
        "q_row",
        "q_head",
        "k_page",
        "table_row",
    ],
    do_not_specialize_on_alignment=["cu_seqlens", "page_tables", "head_len"],
)
def _summed_probabilities_kernel(
    q,
    lse,
    cu_seqlens,
    k_pages,
    page_tables,
    head_len,
    sums,
    num_rows,
    num_tokens,
    q_row,
    q_head,
    k_page,
    table_row,
    scale: tl.constexpr,
    SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """One program: a tile of tokens and a tile of rows of a request, over all heads.
    Pages lie ``k_page`` slots apart."""
    request = tl.program_id(2).to(tl.int64)
    start = tl.load(cu_seqlens + request).to(tl.int64)
    own_rows = tl.load(cu_seqlens + request + 1) - start
    own_tokens = tl.load(head_len + request * NUM_KV_HEADS)
    first_token = tl.program_id(0) * BLOCK_K
    first_row = tl.program_id(1) * BLOCK_P
    token = first_token + tl.arange(0, BLOCK_K)
    row = first_row + tl.arange(0, BLOCK_P)
    dim = tl.arange(0, BLOCK_D)
    is_token = token < own_tokens
    is_row = row < own_rows
    in_head = dim < HEAD_DIM
    page = tl.load(
        page_tables + request * table_row + token // PAGE_SIZE, mask=is_token, other=0
    )
    slot = page.to(tl.int64) * k_page + token % PAGE_SIZE * NUM_KV_HEADS
    first_q = q + (start + row)[:, None] * q_row + dim[None, :]
    first_lse = lse + (start + row) * NUM_KV_HEADS * SHARING
    total = tl.zeros([BLOCK_P, BLOCK_K], tl.float32)
    num_heads = tl.where(
        (first_token < own_tokens) & (first_row < own_rows), NUM_KV_HEADS * SHARING, 0
    )
    for head in range(num_heads):
        keys = tl.load(
            k_pages + (slot + head // SHARING)[None, :] * HEAD_DIM + dim[:, None],
            mask=is_token[None, :] & in_head[:, None],
            other=0.0,
        )
        queries = tl.load(
            first_q + head * q_head, mask=is_row[:, None] & in_head[None, :], other=0.0
        )
        denominators = tl.load(first_lse + head, mask=is_row, other=float("inf"))
        powers = (
            tl.dot(queries, keys, input_precision="ieee") * scale
            - denominators[:, None] * 1.4426950408889634
        )
        total += tl.exp2(powers)
    at = (request * num_rows + row)[:, None] * num_tokens + token[None, :]
    kept = (row < num_rows)[:, None] & (token < num_tokens)[None, :]
    tl.store(sums + at, tl.where(is_token[None, :], total, 0.0), mask=kept)


def voting_scores(q, k, lse):
    scores = k.new_empty(k.shape[1], k.shape[0], dtype=torch.float32)
    num_voters, (num_keys, num_kv_heads, _) = q.shape[0], k.shape
    if not num_voters or not num_keys:
        return scores.zero_()
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    constants = _constants(q, num_kv_heads)
    num_pairs = num_voters * constants["SHARING"]
    _voting_kernel[triton.cdiv(num_keys, constants["BLOCK_K"]), num_kv_heads](
        q,
        k,
        lse,
        scores,
        num_pairs,
        num_keys,
        *q.stride()[:2],
        *k.stride()[:2],
        *lse.stride(),
        **constants,
    )
    return scores


def summed_probabilities(q, lse, cu_seqlens, keys, num_rows, num_tokens):
    k_pages, page_tables, head_len = keys
    num_requests, num_kv_heads = head_len.shape
    sums = q.new_empty(num_requests, num_rows, num_tokens, dtype=torch.float32)
    if sums.numel():
        q = q if q.stride(2) == 1 else q.contiguous()
        constants = _constants(q, num_kv_heads)
        grid = (
            triton.cdiv(num_tokens, constants["BLOCK_K"]),
            triton.cdiv(num_rows, constants["BLOCK_P"]),
            num_requests,
        )
        _summed_probabilities_kernel[grid](
            q,
            lse,
            cu_seqlens,
            k_pages,
            page_tables,
            head_len,
            sums,
            num_rows,
            num_tokens,
            *q.stride()[:2],
            k_pages.stride(0) // q.shape[2],
            page_tables.stride(0),
            **constants,
            NUM_KV_HEADS=num_kv_heads,
            PAGE_SIZE=k_pages.shape[1] // num_kv_heads,
        )
    return sums


def _constants(q, num_kv_heads):
    """Constants and compile options of both kernels."""
    _, num_heads, head_dim = q.shape
    wide = q.dtype == torch.float32
    return {
        "scale": head_dim**-0.5 * math.log2(math.e),
        "SHARING": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        # Small tiles, so that a single request has programs for many multiprocessors.
        "BLOCK_P": 32,
        "BLOCK_K": 32,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        # At most 96 KiB of shared memory, which every GPU since 2020 has.
        "num_stages": 1 if wide else 4 if head_dim <= 128 else 2,
        # Four warps would spill in float32 on GPUs of compute capability 8.6.
        "num_warps": 8 if wide else 4,
    }
