"""Keys and values written to slots of pages, on CUDA devices."""

import torch

import triton
import triton.language as tl


@triton.jit
def _write_kernel(
    k, v, k_pages, v_pages, slots, k_row, k_head, v_row, v_head, page_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS_PER_PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: the keys or the values of all heads of a row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slots + row * NUM_KV_HEADS + head, mask=head < NUM_KV_HEADS, other=-1)
    kept = (slot >= 0) & (dim < HEAD_DIM)
    target = slot // SLOTS_PER_PAGE * page_stride + slot % SLOTS_PER_PAGE * HEAD_DIM + dim
    if tl.program_id(1) == 0:
        tl.store(k_pages + target, tl.load(k + row * k_row + head * k_head + dim, mask=kept), mask=kept)
    else:
        tl.store(v_pages + target, tl.load(v + row * v_row + head * v_head + dim, mask=kept), mask=kept)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor
) -> None:
    num_rows, num_kv_heads, head_dim = k.shape
    if not slots.numel():
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    _write_kernel[(num_rows, 2)](
        k, v, k_pages, v_pages, slots.contiguous(), *k.stride()[:2], *v.stride()[:2], k_pages.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        SLOTS_PER_PAGE=k_pages.shape[1],
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip
