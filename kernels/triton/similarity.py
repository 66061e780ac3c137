"""Similarity of fresh and retained values, and choice of the least similar rows, on
CUDA devices.
"""

import torch

import triton
import triton.language as tl
from dllm_engine.kernels.similarity import EPS, ROUNDING

BLOCK = 64


@triton.jit(do_not_specialize=["num_rows"])
def _replace_kernel(
    fresh,
    pages,
    slots,
    sums,
    num_rows,
    fresh_row,
    fresh_head,
    page_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS_PER_PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: all heads of a row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    slot = tl.load(
        slots + row * NUM_KV_HEADS + head, mask=head < NUM_KV_HEADS, other=-1
    )
    kept = (slot >= 0)[:, None] & (dim < HEAD_DIM)[None, :]
    a = tl.load(
        fresh + row * fresh_row + head[:, None] * fresh_head + dim[None, :],
        mask=kept,
        other=0.0,
    )
    place = (slot // SLOTS_PER_PAGE * page_stride + slot % SLOTS_PER_PAGE * HEAD_DIM)[
        :, None
    ] + dim[None, :]
    b = tl.load(pages + place, mask=kept, other=0.0)
    # Several threads load the same numbers of a small tile, and one of them stores.
    tl.debug_barrier()
    tl.store(pages + place, a, mask=kept)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    tl.store(sums + row, tl.sum(tl.sum(a * b, axis=1), axis=0))
    tl.store(sums + num_rows + row, tl.sum(tl.sum(a * a, axis=1), axis=0))
    tl.store(sums + num_rows * 2 + row, tl.sum(tl.sum(b * b, axis=1), axis=0))


def replace_and_compare(fresh, pages, slots):
    num_rows, num_kv_heads, head_dim = fresh.shape
    sums = fresh.new_empty(3, num_rows, dtype=torch.float32)
    if not num_rows:
        return sums
    fresh = fresh if fresh.stride(2) == 1 else fresh.contiguous()
    _replace_kernel[(num_rows,)](
        fresh,
        pages,
        slots.contiguous(),
        sums,
        num_rows,
        *fresh.stride()[:2],
        pages.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        SLOTS_PER_PAGE=pages.shape[1],
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )
    return sums


@triton.jit
def _similarity(
    sums,
    row,
    exists,
    sum_stride,
    METRIC: tl.constexpr,
    EPS: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """Similarity of rows; infinite instead of NaN."""
    similarity = tl.load(sums + row, mask=exists, other=0.0)
    if METRIC != "random":
        fresh = tl.load(sums + sum_stride + row, mask=exists, other=0.0)
        retained = tl.load(sums + sum_stride * 2 + row, mask=exists, other=0.0)
        if METRIC == "cosine":
            norms = tl.maximum(tl.sqrt_rn(fresh), EPS) * tl.maximum(
                tl.sqrt_rn(retained), EPS
            )
            similarity = tl.minimum(tl.div_rn(similarity, norms), 1 - ROUNDING)
        else:
            distance = fresh + retained - 2 * similarity
            similarity = -tl.where(
                distance <= ROUNDING * (fresh + retained), 0.0, distance
            )
    return tl.where(similarity == similarity, similarity, float("inf"))


@triton.jit(do_not_specialize=["sum_stride", "member_stride", "num_rows", "count"])
def _choose_kernel(
    sums,
    candidates,
    places,
    rows,
    place_of_row,
    sum_stride,
    member_stride,
    num_rows,
    count,
    METRIC: tl.constexpr,
    EPS: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the ranks of some candidates of a batch member among all candidates
    of this member.
    """
    member = tl.program_id(1).to(tl.int64)
    sums += member * member_stride
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row_similarity = _similarity(
        sums, row, row < num_rows, sum_stride, METRIC, EPS, ROUNDING
    )[:, None]
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, BLOCK):
        other = start + tl.arange(0, BLOCK)
        exists = other < num_rows
        similarity = _similarity(
            sums, other, exists, sum_stride, METRIC, EPS, ROUNDING
        )[None, :]
        is_first = (similarity < row_similarity) | (
            (similarity == row_similarity) & (other[None, :] < row[:, None])
        )
        rank += tl.sum((is_first & exists[None, :]).to(tl.int32), axis=1)
    is_chosen = (row < num_rows) & (rank < count)
    candidate = tl.load(candidates + member * num_rows + row, mask=row < num_rows)
    place = tl.load(places + member * count + rank, mask=is_chosen, other=-1)
    tl.store(rows + place, candidate, mask=is_chosen)
    tl.store(place_of_row + candidate, place, mask=row < num_rows)


def choose_least_similar(sums, metric, candidates, places, rows, place_of_row):
    batch, num_rows = candidates.shape
    sums = sums if sums.stride(2) == 1 else sums.contiguous()
    _choose_kernel[(triton.cdiv(num_rows, BLOCK), batch)](
        sums,
        candidates,
        places,
        rows,
        place_of_row,
        *sums.stride()[:2],
        num_rows,
        places.shape[1],
        METRIC=metric,
        EPS=EPS,
        ROUNDING=ROUNDING,
        BLOCK=BLOCK,
    )
