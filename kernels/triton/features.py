"""Rows of features in pages, on CUDA devices."""

import torch

import triton
import triton.language as tl


@triton.jit
def _features_kernel(
    x, rows, slots, x_row, page_stride,
    WRITES: tl.constexpr,
    ADDS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a block of a row's columns. ``WRITES``: ``x`` to the slots; else from the slots to ``x``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    kept = (column < WIDTH) & (slot >= 0)
    feature = rows + slot // ROWS_PER_PAGE * page_stride + slot % ROWS_PER_PAGE * WIDTH + column
    number = x + row * x_row + column
    if WRITES:
        tl.store(feature, tl.load(number, mask=kept), mask=kept)
    elif ADDS:
        tl.store(number, tl.load(number, mask=kept) + tl.load(feature, mask=kept), mask=kept)
    else:
        tl.store(number, tl.load(feature, mask=kept, other=0.0), mask=column < WIDTH)


def add_features(hidden: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    assert hidden.stride(1) == 1
    _run(hidden, rows, slots, adds=True)


def write_features(values: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    _run(values if values.stride(1) == 1 else values.contiguous(), rows, slots, writes=True)


def read_features(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    out = rows.new_empty(slots.shape[0], rows.shape[2])
    _run(out, rows, slots)
    return out


def _run(x: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *, writes: bool = False, adds: bool = False) -> None:
    _, rows_per_page, width = rows.shape
    if not x.shape[0]:
        return
    block = min(1024, triton.next_power_of_2(width))
    _features_kernel[x.shape[0], triton.cdiv(width, block)](
        x, rows, slots.contiguous(), x.stride(0), rows.stride(0),
        WRITES=writes,
        ADDS=adds,
        WIDTH=width,
        ROWS_PER_PAGE=rows_per_page,
        BLOCK=block,
    )  # fmt: skip
