"""Sums for the similarity of fresh and retained values, on CUDA devices."""

import torch

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def _similarity_kernel(
    fresh, pages, slots, sums, num_rows, fresh_row, fresh_head, page_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS_PER_PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: all heads of a row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    slot = tl.load(slots + row * NUM_KV_HEADS + head, mask=head < NUM_KV_HEADS, other=-1)
    kept = (slot >= 0)[:, None] & (dim < HEAD_DIM)[None, :]
    a = tl.load(fresh + row * fresh_row + head[:, None] * fresh_head + dim[None, :], mask=kept, other=0.0)
    source = slot // SLOTS_PER_PAGE * page_stride + slot % SLOTS_PER_PAGE * HEAD_DIM
    b = tl.load(pages + source[:, None] + dim[None, :], mask=kept, other=0.0)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    tl.store(sums + row, tl.sum(tl.sum(a * b, axis=1), axis=0))
    tl.store(sums + num_rows + row, tl.sum(tl.sum(a * a, axis=1), axis=0))
    tl.store(sums + num_rows * 2 + row, tl.sum(tl.sum(b * b, axis=1), axis=0))


def similarity_sums(fresh: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    num_rows, num_kv_heads, head_dim = fresh.shape
    sums = fresh.new_empty(3, num_rows, dtype=torch.float32)
    if not num_rows:
        return sums
    fresh = fresh if fresh.stride(2) == 1 else fresh.contiguous()
    _similarity_kernel[(num_rows,)](
        fresh, pages, slots.contiguous(), sums, num_rows, *fresh.stride()[:2], pages.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        SLOTS_PER_PAGE=pages.shape[1],
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return sums
