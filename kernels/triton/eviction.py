"""Scores of candidates, and copies of retained tokens to pages, on CUDA devices."""

import torch

import triton
import triton.language as tl

# The arguments of Triton kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs


@triton.jit
def _mean_query_kernel(
    q, mean, num_rows, q_row, q_head,
    SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: Σ_h q̄_h over the query heads of a KV head."""
    kv_head = tl.program_id(0)
    dim = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_rows * SHARING, BLOCK_R):
        pair = first + tl.arange(0, BLOCK_R)
        head = kv_head * SHARING + pair % SHARING
        rows = tl.load(
            q + (pair // SHARING).to(tl.int64)[:, None] * q_row + head[:, None] * q_head + dim[None, :],
            mask=(pair < num_rows * SHARING)[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        total += tl.sum(rows.to(tl.float32), axis=0)
    tl.store(mean + kv_head * HEAD_DIM + dim, total / num_rows, mask=dim < HEAD_DIM)


@triton.jit
def _score_kernel(
    mean, k, scores, num_candidates, k_row, k_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a block of candidates, all heads."""
    candidate = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    dim = tl.arange(0, BLOCK_D)
    in_range = candidate < num_candidates
    total = tl.zeros([BLOCK_C], tl.float32)
    for kv_head in range(NUM_KV_HEADS):
        query = tl.load(mean + kv_head * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
        keys = tl.load(
            k + candidate.to(tl.int64)[:, None] * k_row + kv_head * k_head + dim[None, :],
            mask=in_range[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        total += tl.sum(keys.to(tl.float32) * query[None, :], axis=1)
    tl.store(scores + candidate, total, mask=in_range)


@triton.jit
def _write_retained_kernel(
    k, v, rows, k_pages, v_pages, page_table, first_token, k_row, k_head, v_row, v_head, k_page, v_page,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS_PER_PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: all heads of a retained token."""
    token = tl.program_id(0)
    row = tl.load(rows + token)
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    slot = (first_token + token) * NUM_KV_HEADS + head
    page = tl.load(page_table + slot // SLOTS_PER_PAGE, mask=head < NUM_KV_HEADS, other=0).to(tl.int64)
    offset = slot % SLOTS_PER_PAGE * HEAD_DIM
    mask = (head < NUM_KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    keys = tl.load(k + row * k_row + head[:, None] * k_head + dim[None, :], mask=mask)
    tl.store(k_pages + (page * k_page + offset)[:, None] + dim[None, :], keys, mask=mask)
    values = tl.load(v + row * v_row + head[:, None] * v_head + dim[None, :], mask=mask)
    tl.store(v_pages + (page * v_page + offset)[:, None] + dim[None, :], values, mask=mask)


def mean_query_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    num_candidates, num_kv_heads, head_dim = k.shape
    scores = k.new_empty(num_candidates, dtype=torch.float32)
    if not num_candidates:
        return scores
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    mean = q.new_empty(num_kv_heads * head_dim, dtype=torch.float32)
    block_d = triton.next_power_of_2(head_dim)
    _mean_query_kernel[(num_kv_heads,)](
        q, mean, q.shape[0], *q.stride()[:2],
        SHARING=q.shape[1] // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_R=16,
        BLOCK_D=block_d,
    )  # fmt: skip
    block_c = 16
    _score_kernel[(triton.cdiv(num_candidates, block_c),)](
        mean, k, scores, num_candidates, *k.stride()[:2],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_C=block_c,
        BLOCK_D=block_d,
    )  # fmt: skip
    return scores


def write_retained(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    first_token: int = 0,
) -> None:
    _, num_kv_heads, head_dim = k.shape
    if not rows.shape[0]:
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    _write_retained_kernel[(rows.shape[0],)](
        k, v, rows.contiguous(), k_pages, v_pages, page_table.contiguous(), first_token,
        *k.stride()[:2], *v.stride()[:2], k_pages.stride(0), v_pages.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        SLOTS_PER_PAGE=k_pages.shape[1],
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip
