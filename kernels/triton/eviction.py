"""Scores of candidates, on CUDA devices."""

import torch

import triton
import triton.language as tl

# The arguments of Triton kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs


@triton.jit
def _mean_query_kernel(
    q, mean, spans, q_row, q_head,
    SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: Σ_h q̄_h over the query heads of a request's KV head. ``mean`` ``[requests, kv_heads, head_dim]``."""
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    first_query = tl.load(spans + request * 6 + 4)
    num_queries = tl.load(spans + request * 6 + 5)
    dim = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_queries * SHARING, BLOCK_R):
        pair = first + tl.arange(0, BLOCK_R)
        head = kv_head * SHARING + pair % SHARING
        rows = tl.load(
            q + (first_query + pair // SHARING).to(tl.int64)[:, None] * q_row + head[:, None] * q_head + dim[None, :],
            mask=(pair < num_queries * SHARING)[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        total += tl.sum(rows.to(tl.float32), axis=0)
    at = (request * tl.num_programs(1) + kv_head) * HEAD_DIM
    tl.store(mean + at + dim, total / num_queries, mask=dim < HEAD_DIM)


@triton.jit(do_not_specialize=["longest"])
def _score_kernel(
    mean, k, scores, spans, longest, k_row, k_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a block of a request's candidates, all heads."""
    request = tl.program_id(1).to(tl.int64)
    first_key = tl.load(spans + request * 6)
    before = tl.load(spans + request * 6 + 1)
    gap = tl.load(spans + request * 6 + 2)
    candidate = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    key = first_key + candidate + tl.where(candidate < before, 0, gap)
    dim = tl.arange(0, BLOCK_D)
    in_range = candidate < tl.load(spans + request * 6 + 3)
    total = tl.zeros([BLOCK_C], tl.float32)
    for kv_head in range(NUM_KV_HEADS):
        at = (request * NUM_KV_HEADS + kv_head) * HEAD_DIM
        query = tl.load(mean + at + dim, mask=dim < HEAD_DIM, other=0.0)
        keys = tl.load(
            k + key.to(tl.int64)[:, None] * k_row + kv_head * k_head + dim[None, :],
            mask=in_range[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        total += tl.sum(keys.to(tl.float32) * query[None, :], axis=1)
    tl.store(scores + request * longest + candidate, total, mask=in_range)


def mean_query_scores(q: torch.Tensor, k: torch.Tensor, spans: torch.Tensor, longest: int) -> torch.Tensor:
    num_requests, (_, num_kv_heads, head_dim) = spans.shape[0], k.shape
    scores = k.new_empty(num_requests, longest, dtype=torch.float32)
    if not scores.numel():
        return scores
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    spans = spans.contiguous()
    mean = q.new_empty(num_requests, num_kv_heads, head_dim, dtype=torch.float32)
    block_d = triton.next_power_of_2(head_dim)
    _mean_query_kernel[num_requests, num_kv_heads](
        q, mean, spans, *q.stride()[:2],
        SHARING=q.shape[1] // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_R=16,
        BLOCK_D=block_d,
    )  # fmt: skip
    block_c = 16
    _score_kernel[triton.cdiv(longest, block_c), num_requests](
        mean, k, scores, spans, longest, *k.stride()[:2],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_C=block_c,
        BLOCK_D=block_d,
    )  # fmt: skip
    return scores
