"""Rows of features in pages, on CUDA devices."""

import torch

import triton
import triton.language as tl

# The arguments of Triton kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs


@triton.jit
def _add_features_kernel(
    hidden, rows, slots, hidden_row, page_stride,
    WIDTH: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a block of a row's columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    kept = (column < WIDTH) & (slot >= 0)
    source = slot // ROWS_PER_PAGE * page_stride + slot % ROWS_PER_PAGE * WIDTH
    added = tl.load(rows + source + column, mask=kept)
    target = hidden + row * hidden_row + column
    tl.store(target, tl.load(target, mask=kept) + added, mask=kept)


@triton.jit
def _write_features_kernel(
    values, rows, slots, values_row, page_stride,
    WIDTH: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a block of a row's columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    kept = (column < WIDTH) & (slot >= 0)
    target = slot // ROWS_PER_PAGE * page_stride + slot % ROWS_PER_PAGE * WIDTH
    tl.store(rows + target + column, tl.load(values + row * values_row + column, mask=kept), mask=kept)


@triton.jit
def _read_features_kernel(
    rows, slots, out, page_stride,
    WIDTH: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a block of a row's columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    source = slot // ROWS_PER_PAGE * page_stride + slot % ROWS_PER_PAGE * WIDTH
    read = tl.load(rows + source + column, mask=(column < WIDTH) & (slot >= 0), other=0.0)
    tl.store(out + row * WIDTH + column, read, mask=column < WIDTH)


def add_features(hidden: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    if not hidden.shape[0]:
        return
    grid, constants = _launch(rows, slots)
    _add_features_kernel[grid](hidden, rows, slots.contiguous(), hidden.stride(0), rows.stride(0), **constants)


def write_features(values: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    if not values.shape[0]:
        return
    values = values if values.stride(1) == 1 else values.contiguous()
    grid, constants = _launch(rows, slots)
    _write_features_kernel[grid](values, rows, slots.contiguous(), values.stride(0), rows.stride(0), **constants)


def read_features(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    out = rows.new_empty(slots.shape[0], rows.shape[2])
    if out.shape[0]:
        grid, constants = _launch(rows, slots)
        _read_features_kernel[grid](rows, slots.contiguous(), out, rows.stride(0), **constants)
    return out


def _launch(rows: torch.Tensor, slots: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and constants that the three kernels have in common."""
    _, rows_per_page, width = rows.shape
    block = min(1024, triton.next_power_of_2(width))
    constants = {"WIDTH": width, "ROWS_PER_PAGE": rows_per_page, "BLOCK": block}
    return (slots.shape[0], triton.cdiv(width, block)), constants
