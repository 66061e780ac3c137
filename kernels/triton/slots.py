"""Values written to slots of pages, on CUDA devices."""

import torch

import triton
import triton.language as tl


@triton.jit
def _write_slots_kernel(
    first, second, first_pages, second_pages, slots, first_row, first_head, second_row, second_head, page_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS_PER_PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: all heads of a row of the first tensor, or of the second."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slots + row * NUM_KV_HEADS + head, mask=head < NUM_KV_HEADS, other=-1)
    kept = (slot >= 0) & (dim < HEAD_DIM)
    target = slot // SLOTS_PER_PAGE * page_stride + slot % SLOTS_PER_PAGE * HEAD_DIM + dim
    if tl.program_id(1) == 0:
        tl.store(first_pages + target, tl.load(first + row * first_row + head * first_head + dim, mask=kept), mask=kept)
    else:
        values = tl.load(second + row * second_row + head * second_head + dim, mask=kept)
        tl.store(second_pages + target, values, mask=kept)


def write_slots(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    _write([values], [pages], slots)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor
) -> None:
    _write([k, v], [k_pages, v_pages], slots)


def _write(values: list[torch.Tensor], pages: list[torch.Tensor], slots: torch.Tensor) -> None:
    """``values`` and ``pages``: one of each or two."""
    num_rows, num_kv_heads, head_dim = values[0].shape
    if not slots.numel():
        return
    values = [x if x.stride(2) == 1 else x.contiguous() for x in values]
    _write_slots_kernel[(num_rows, len(values))](
        values[0], values[-1], pages[0], pages[-1], slots.contiguous(), *values[0].stride()[:2],
        *values[-1].stride()[:2], pages[0].stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        SLOTS_PER_PAGE=pages[0].shape[1],
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip
