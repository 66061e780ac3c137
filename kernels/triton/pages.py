"""Keys and values in slots of pages, and rows of features in pages, on CUDA devices."""

import triton
import triton.language as tl


@triton.jit
def _write_kernel(
    k,
    v,
    k_pages,
    v_pages,
    slots,
    rows,
    k_row,
    k_head,
    v_row,
    v_head,
    page_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS_PER_PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: the keys or the values of all heads of a row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    slot_row = row if rows is None else tl.load(rows + row)
    slot = tl.load(
        slots + slot_row * NUM_KV_HEADS + head, mask=head < NUM_KV_HEADS, other=-1
    )
    kept = (slot >= 0) & (dim < HEAD_DIM)
    target = (
        slot // SLOTS_PER_PAGE * page_stride + slot % SLOTS_PER_PAGE * HEAD_DIM + dim
    )
    if tl.program_id(1) == 0:
        tl.store(
            k_pages + target,
            tl.load(k + row * k_row + head * k_head + dim, mask=kept),
            mask=kept,
        )
    else:
        tl.store(
            v_pages + target,
            tl.load(v + row * v_row + head * v_head + dim, mask=kept),
            mask=kept,
        )


def write_kv(k, v, k_pages, v_pages, slots, rows=None):
    num_rows, num_kv_heads, head_dim = k.shape
    if not num_rows:
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    _write_kernel[(num_rows, 2)](
        k,
        v,
        k_pages,
        v_pages,
        slots.contiguous(),
        rows,
        *k.stride()[:2],
        *v.stride()[:2],
        k_pages.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        SLOTS_PER_PAGE=k_pages.shape[1],
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )


@triton.jit
def _add_or_renew_kernel(
    hidden,
    rows,
    slots,
    places,
    attended,
    before_mlp,
    mlp_output,
    page_stride,
    WIDTH: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a block of a row's columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < WIDTH
    slot = tl.load(slots + row)
    place = tl.load(places + row)
    feature = (
        rows
        + slot // ROWS_PER_PAGE * page_stride
        + slot % ROWS_PER_PAGE * WIDTH
        + column
    )
    number = hidden + row * WIDTH + column
    kept = exists & (slot >= 0)
    if place >= 0:
        source = place * WIDTH + column
        output = tl.load(mlp_output + source, mask=exists)
        tl.store(feature, output + tl.load(attended + source, mask=kept), mask=kept)
        tl.store(
            number, tl.load(before_mlp + source, mask=exists) + output, mask=exists
        )
    else:
        tl.store(
            number, tl.load(number, mask=kept) + tl.load(feature, mask=kept), mask=kept
        )


def add_or_renew_features(hidden, rows, slots, places, computed):
    _, rows_per_page, width = rows.shape
    block = min(1024, triton.next_power_of_2(width))
    _add_or_renew_kernel[hidden.shape[0], triton.cdiv(width, block)](
        hidden,
        rows,
        slots,
        places,
        *(x.contiguous() for x in computed),
        rows.stride(0),
        WIDTH=width,
        ROWS_PER_PAGE=rows_per_page,
        BLOCK=block,
    )
