"""Keys and values in slots of pages, and rows of features in pages, on CUDA devices."""

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


def write_kv(k, v, k_pages, v_pages, slots):
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


def add_features(hidden, rows, slots):
    assert hidden.stride(1) == 1
    _run(hidden, rows, slots, adds=True)


def write_features(values, rows, slots):
    _run(values if values.stride(1) == 1 else values.contiguous(), rows, slots, writes=True)


def read_features(rows, slots):
    out = rows.new_empty(slots.shape[0], rows.shape[2])
    _run(out, rows, slots)
    return out


def _run(x, rows, slots, *, writes=False, adds=False):
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
