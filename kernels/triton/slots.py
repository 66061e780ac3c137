"""Values written to slots of pages, on CUDA devices."""

import torch

import triton
import triton.language as tl

# The arguments of Triton kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs


@triton.jit
def _write_slots_kernel(
    values, pages, slots, values_row, values_head, page_stride,
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
    written = tl.load(values + row * values_row + head[:, None] * values_head + dim[None, :], mask=kept)
    target = slot // SLOTS_PER_PAGE * page_stride + slot % SLOTS_PER_PAGE * HEAD_DIM
    tl.store(pages + target[:, None] + dim[None, :], written, mask=kept)


def write_slots(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    num_rows, num_kv_heads, head_dim = values.shape
    if not values.numel():
        return
    values = values if values.stride(2) == 1 else values.contiguous()
    _write_slots_kernel[(num_rows,)](
        values, pages, slots.contiguous(), *values.stride()[:2], pages.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        SLOTS_PER_PAGE=pages.shape[1],
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip
