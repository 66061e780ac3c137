"""Rotary position embedding, on CUDA devices."""

import triton
import triton.language as tl


@triton.jit
def _rotate_kernel(
    x,
    positions,
    cos_sin,
    rows,
    x_row,
    x_head,
    num_heads,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: a row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_D)
    exists = column < HALF
    position = tl.load(positions + (row if rows is None else tl.load(rows + row)))
    angles = cos_sin + position * 2 * HALF + column
    cos = tl.load(angles, mask=exists, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=exists, other=0.0)[None, :]
    kept = (head < num_heads) & exists[None, :]
    place = x + row * x_row + head * x_head + column[None, :]
    first = tl.load(place, mask=kept, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=kept, other=0.0).to(tl.float32)
    tl.store(place, first * cos - second * sin, mask=kept)
    tl.store(place + HALF, second * cos + first * sin, mask=kept)


def rotate_(x, positions, cos_sin, rows=None):
    num_rows, num_heads, _ = x.shape
    half = cos_sin.shape[1] // 2
    if x.numel():
        _rotate_kernel[(num_rows,)](
            x,
            positions,
            cos_sin,
            rows,
            x.stride(0),
            x.stride(1),
            num_heads,
            HALF=half,
            BLOCK_H=triton.next_power_of_2(num_heads),
            BLOCK_D=triton.next_power_of_2(half),
        )
