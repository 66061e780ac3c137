r"""Attention over pages of retained tokens, together with fresh rows or after writing them into the pages.

Request r has rows R_r in the flat batch and, per KV head h, ``head_len[r, h]`` retained tokens. Token t of head h lies
in virtual slot  head_start[r, h] + t · token_stride[r];  virtual slot σ lies in physical page
``page_tables[r, σ // slots_per_page]`` at offset ``σ % slots_per_page``. One formula for both layouts:

    token-major:   head_start[r, h] = h, token_stride = num_kv_heads; grows by appending pages
    packed ranges: token_stride = 1, head_start = prefix sums of the heads' budgets

With K_h, V_h the retained tokens of head h, and joined to them with ``attend_fresh`` the request's own fresh rows:

    out_i = Σ_j exp(s_ij − lse_i) v_j,   s_ij = q_i · k_j / √d,   lse_i = log Σ_j exp(s_ij),   i ∈ R_r

Query heads share KV heads in consecutive groups. A row with nothing to attend to has out = 0 and lse = −∞. Slots that
hold no retained token are never used in arithmetic: they may hold NaN.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.nn.functional as F

from dllm_engine.kernels._operator import operator
from dllm_engine.kernels._triton import jit, tl, triton

# The arguments of Triton kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

_COPIED_BYTES = 1 << 20
"""Keys and values that a CPU copies out of pages per thread before it attends to them: half of a core's cache."""


@jit
def _attention_kernel(
    q, k, v, cu_seqlens, k_pages, v_pages, page_tables, head_start, token_stride, head_len, out, lse,
    q_row, q_head, k_row, k_head, v_row, v_head, k_page, v_page, table_row, out_split, lse_split, num_blocks,
    scale: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS_PER_PAGE: tl.constexpr,
    ATTEND_FRESH: tl.constexpr,
    CAUSAL: tl.constexpr,
    WITH_LSE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a block of a request's (row, query head) pairs that share a KV head, over one split of the keys.

    The keys of a request and head, retained then fresh, are a row of tiles of ``BLOCK_K``; split s of n takes the s-th
    n-th of the tiles. ``scale`` includes log2(e), so that exponentials are powers of two.
    """
    request = tl.program_id(0) // num_blocks
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(cu_seqlens + request)
    num_rows = tl.load(cu_seqlens + request + 1) - start
    pair = tl.program_id(0) % num_blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
    if tl.program_id(0) % num_blocks * BLOCK_Q >= num_rows * SHARING:
        return
    row = pair // SHARING
    head = kv_head * SHARING + pair % SHARING
    dim = tl.arange(0, BLOCK_D)
    in_range = row < num_rows
    in_head = dim < HEAD_DIM
    tile_q = tl.load(
        q + (start + row).to(tl.int64)[:, None] * q_row + head[:, None] * q_head + dim[None, :],
        mask=in_range[:, None] & in_head[None, :],
        other=0.0,
    )

    retained = tl.load(head_len + request * NUM_KV_HEADS + kv_head)
    num_retained_tiles = tl.cdiv(retained, BLOCK_K)
    num_tiles = num_retained_tiles
    if ATTEND_FRESH:
        num_tiles += tl.cdiv(num_rows, BLOCK_K)
    tiles_per_split = tl.cdiv(num_tiles, tl.num_programs(2))
    first = split * tiles_per_split
    stop = tl.minimum(first + tiles_per_split, num_tiles)

    highest = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    weighted = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    first_slot = tl.load(head_start + request * NUM_KV_HEADS + kv_head)
    stride = tl.load(token_stride + request)
    table = page_tables + request.to(tl.int64) * table_row
    for tile in range(first, tl.minimum(stop, num_retained_tiles)):
        token = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        exists = token < retained
        slot = first_slot + token * stride
        page = tl.load(table + slot // SLOTS_PER_PAGE, mask=exists, other=0).to(tl.int64)
        offset = slot % SLOTS_PER_PAGE * HEAD_DIM
        keys = tl.load(
            k_pages + (page * k_page + offset)[None, :] + dim[:, None],
            mask=exists[None, :] & in_head[:, None],
            other=0.0,
        )
        values = tl.load(
            v_pages + (page * v_page + offset)[:, None] + dim[None, :],
            mask=exists[:, None] & in_head[None, :],
            other=0.0,
        )
        visible = exists[None, :] & in_range[:, None]
        if CAUSAL and not ATTEND_FRESH:
            visible = visible & (token[None, :] <= retained - num_rows + row[:, None])
        highest, total, weighted = _accumulate(tile_q, keys, values, visible, highest, total, weighted, scale)

    if ATTEND_FRESH:
        for tile in range(tl.maximum(first, num_retained_tiles), stop):
            token = (tile - num_retained_tiles) * BLOCK_K + tl.arange(0, BLOCK_K)
            exists = token < num_rows
            fresh = (start + token).to(tl.int64)
            keys = tl.load(
                k + fresh[None, :] * k_row + kv_head * k_head + dim[:, None],
                mask=exists[None, :] & in_head[:, None],
                other=0.0,
            )
            values = tl.load(
                v + fresh[:, None] * v_row + kv_head * v_head + dim[None, :],
                mask=exists[:, None] & in_head[None, :],
                other=0.0,
            )
            visible = exists[None, :] & in_range[:, None]
            if CAUSAL:
                visible = visible & (token[None, :] <= row[:, None])
            highest, total, weighted = _accumulate(tile_q, keys, values, visible, highest, total, weighted, scale)

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    # Results are contiguous: [splits, rows, heads, dims] and [splits, rows, heads].
    target = (start + row).to(tl.int64) * NUM_KV_HEADS * SHARING + head
    tl.store(
        out + split.to(tl.int64) * out_split + target[:, None] * HEAD_DIM + dim[None, :],
        (weighted / total[:, None]).to(out.dtype.element_ty),
        mask=in_range[:, None] & in_head[None, :],
    )
    if WITH_LSE:
        natural = tl.where(empty, -float("inf"), (highest + tl.log2(total)) * 0.6931471805599453)
        tl.store(lse + split.to(tl.int64) * lse_split + target, natural, mask=in_range)


@jit
def _accumulate(q, keys, values, visible, highest, total, weighted, scale):
    """One tile of the online softmax."""
    # float32 products in full precision: TF32 would lose what float32 was asked for.
    scores = tl.where(visible, tl.dot(q, keys, input_precision="ieee") * scale, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    # While nothing is visible the maximum is -inf, and -inf - -inf is not a number.
    shift = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(highest - shift)
    total = total * decay + tl.sum(weights, axis=1)
    product = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_highest, total, weighted * decay[:, None] + product


@jit
def _combine_kernel(
    partial_out, partial_lse, out, lse, out_split, lse_split,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a row and query head; out = Σ_s exp(lse_s − lse) out_s."""
    target = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    lses = tl.load(partial_lse + split * lse_split + target, mask=split < NUM_SPLITS, other=-float("inf"))
    highest = tl.max(lses, axis=0)
    shift = tl.where(highest == -float("inf"), 0.0, highest)
    weights = tl.exp(lses - shift)
    total = tl.sum(weights, axis=0)
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    parts = tl.load(
        partial_out + split.to(tl.int64)[:, None] * out_split + target * HEAD_DIM + dim[None, :],
        mask=(split < NUM_SPLITS)[:, None] & in_head[None, :],
        other=0.0,
    )
    combined = tl.sum(parts * weights[:, None], axis=0) / total
    tl.store(out + target * HEAD_DIM + dim, combined.to(out.dtype.element_ty), mask=in_head)
    if WITH_LSE:
        tl.store(lse + target, tl.where(empty, -float("inf"), shift + tl.log(total)))


@jit
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


@overload
def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
    k_slots: torch.Tensor | None = None,
    v_slots: torch.Tensor | None = None,
    *,
    attend_fresh: bool,
    causal: bool = False,
    return_lse: Literal[False] = False,
    max_seqlen: int | None = None,
    max_head_len: int | None = None,
) -> torch.Tensor: ...


@overload
def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
    k_slots: torch.Tensor | None = None,
    v_slots: torch.Tensor | None = None,
    *,
    attend_fresh: bool,
    causal: bool = False,
    return_lse: Literal[True],
    max_seqlen: int | None = None,
    max_head_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
    k_slots: torch.Tensor | None = None,
    v_slots: torch.Tensor | None = None,
    *,
    attend_fresh: bool,
    causal: bool = False,
    return_lse: bool = False,
    max_seqlen: int | None = None,
    max_head_len: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from each request's rows to its retained tokens.

    On CPU, requests in token-major layout that have equally many rows and retained tokens share one library call.

    Args:
        q: ``[num_rows, num_heads, head_dim]``.
        k, v: the rows' own keys and values, ``[num_rows, num_kv_heads, head_dim]``.
        cu_seqlens: first row of each request and, last, ``num_rows``; int32 ``[num_requests + 1]``.
        k_pages, v_pages: ``[num_pages, slots_per_page, head_dim]``; a page is contiguous, pages need not follow each
            other closely (both may be views of one allocation).
        page_tables: int32 ``[num_requests, max_pages]``; entries beyond a request's pages are never read.
        head_start, head_len: int32 ``[num_requests, num_kv_heads]``.
        token_stride: int32 ``[num_requests]``.
        k_slots, v_slots: with ``attend_fresh=False``, the physical slot ``page · slots_per_page + offset`` each row
            and KV head is written to before anything is read; int64 ``[num_rows, num_kv_heads]``, −1 writes nothing,
            None writes nothing at all. No slot may be named twice.
        attend_fresh: attend to retained tokens and the request's own fresh rows; otherwise to its pages alone.
        causal: fresh row i sees all retained tokens and fresh rows ≤ i. With ``attend_fresh=False`` the n rows are
            taken to be the last n of the retained tokens: row i sees tokens t ≤ head_len − n + i.
        return_lse: also return the natural logarithm of each softmax's denominator.
        max_seqlen, max_head_len: upper bounds of rows per request and of ``head_len``. A CUDA device needs them on
            the host to launch; left out, they are copied from the device, which waits for it. A captured launch stays
            correct for any tables within ``max_seqlen``; ``max_head_len`` only decides how finely it is split.

    Returns:
        ``[num_rows, num_heads, head_dim]``; with ``return_lse`` also float32 ``[num_rows, num_heads]``.

    Raises:
        ValueError: shapes or lengths that do not belong together; slots to write with ``attend_fresh=True``.
    """
    if not isinstance(cu_seqlens, torch.Tensor):
        if max_seqlen is None:
            max_seqlen = max((stop - start for start, stop in itertools.pairwise(cu_seqlens)), default=0)
        cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32, device=q.device)
    _check(q, k, v, cu_seqlens, k_pages, v_pages, page_tables, head_start, token_stride, head_len)
    if attend_fresh and (k_slots is not None or v_slots is not None):
        raise ValueError("attend_fresh=True reads fresh K/V directly; k_slots and v_slots belong to attend_fresh=False")
    if k_slots is not None:
        write_slots(k, k_pages, k_slots)
    if v_slots is not None:
        write_slots(v, v_pages, v_slots)
    out, lse = _attend(
        q, k, v, cu_seqlens, k_pages, v_pages, page_tables, head_start, token_stride, head_len,
        attend_fresh, causal, return_lse, max_seqlen, max_head_len,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bidirectional attention within each sequence, and the logarithm of each softmax's denominator.

    Arguments as of ``bidirectional_attention``; returns ``[num_rows, num_heads, head_dim]`` and float32
    ``[num_rows, num_heads]``.
    """
    num_sequences, num_kv_heads = len(cu_seqlens) - 1, k.shape[1]
    no_page = k.new_empty(1, num_kv_heads, k.shape[2])
    zeros = torch.zeros(num_sequences, num_kv_heads, dtype=torch.int32, device=q.device)
    return paged_attention(
        q, k, v, cu_seqlens, no_page, no_page, zeros[:, :1], zeros, zeros[:, 0], zeros,
        attend_fresh=True, return_lse=True, max_head_len=0,
    )  # fmt: skip


@operator("write_slots", mutates=("pages",))
def write_slots(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Write ``values[i, h]`` to physical slot ``slots[i, h]``.

    Args:
        values: ``[num_rows, num_kv_heads, head_dim]``.
        pages: ``[num_pages, slots_per_page, head_dim]``.
        slots: int64 ``[num_rows, num_kv_heads]``; −1 writes nothing.
    """
    _check_slots(values, pages, slots)
    kept = slots >= 0
    if not kept.all():
        values, slots = values[kept], slots[kept]
    slots_per_page = pages.shape[1]
    pages[slots // slots_per_page, slots % slots_per_page] = values


@write_slots.register_kernel("CUDA")
def write_slots_with_triton(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    _check_slots(values, pages, slots)
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


@write_slots.register_fake
def _(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    _check_slots(values, pages, slots)


@operator("paged_attention")
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
    attend_fresh: bool,
    causal: bool,
    return_lse: bool,
    max_seqlen: int | None,
    max_head_len: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``paged_attention`` after the writes: (out, lse), with lse empty where it is not asked for."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != q.shape[0] or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens={bounds} does not divide {q.shape[0]} rows")
    num_requests = len(bounds) - 1
    out, lse = _empty_results(q, return_lse)
    groups = _equal_groups(bounds, k_pages, page_tables, head_start, token_stride, head_len)
    for (length, retained), group in groups.items():
        num_fresh = length if attend_fresh else 0
        copies = None
        per_part = len(group)
        if retained:
            page_size = k_pages.shape[1] // k.shape[1]
            copied = num_fresh + -(-retained // page_size) * page_size
            per_part = _requests_per_part(copied, k)
            copies = k.new_empty(2, min(per_part, len(group)), copied, *k.shape[1:])
        for start in range(0, len(group), per_part):
            members = group[start : start + per_part]
            rows = _rows(bounds, members, length)
            fresh_k = k[rows].view(len(members), length, *k.shape[1:])[:, :num_fresh]
            fresh_v = v[rows].view(len(members), length, *v.shape[1:])[:, :num_fresh]
            if retained is None:
                of_members = [x[torch.tensor(members)] for x in (page_tables, head_start, token_stride, head_len)]
                keys, values, visible = _gather_ragged(fresh_k, fresh_v, k_pages, v_pages, *of_members)
            else:
                keys, values, visible = fresh_k, fresh_v, None
                if copies is not None:
                    keys = _gather_whole_pages(fresh_k, k_pages, page_tables, members, retained, copies[0])
                    values = _gather_whole_pages(fresh_v, v_pages, page_tables, members, retained, copies[1])
            if causal:
                seen = _causal(length, keys.shape[1], head_len[members], attend_fresh)
                visible = seen if visible is None else visible & seen
            part_q = q[rows].view(len(members), length, *q.shape[1:])
            part_out, part_lse = _softmax_attention(part_q, keys, values, visible, return_lse)
            if len(members) == num_requests and part_lse is None:
                return part_out.flatten(0, 1).contiguous(), lse
            out[rows] = part_out.flatten(0, 1)
            if part_lse is not None:
                lse[rows] = part_lse.flatten(0, 1)
    return out, lse


@_attend.register_kernel("CUDA")
def attend_with_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
    attend_fresh: bool,
    causal: bool,
    return_lse: bool,
    max_seqlen: int | None,
    max_head_len: int | None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_attend`` in Triton; ``num_splits`` programs share the keys of a row (None: as many as fill the device)."""
    out, lse = _empty_results(q, return_lse)
    num_requests, num_kv_heads = head_len.shape
    num_heads, head_dim = q.shape[1:]
    if not num_requests or not q.numel():
        return out, lse
    if max_seqlen is None:
        max_seqlen = int(cu_seqlens.diff().max())
    if max_head_len is None:
        max_head_len = int(head_len.max())
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    page_tables = page_tables if page_tables.stride(1) == 1 else page_tables.contiguous()
    sharing = num_heads // num_kv_heads
    block_q, block_k, num_warps, num_stages = _tiles(max_seqlen * sharing, head_dim, q.dtype)
    num_blocks = triton.cdiv(max_seqlen * sharing, block_q)
    if num_splits is None:
        num_tiles = triton.cdiv(max_head_len, block_k) + (triton.cdiv(max_seqlen, block_k) if attend_fresh else 0)
        num_splits = _num_splits(num_requests * num_blocks * num_kv_heads, num_tiles, q.device)
    split = num_splits > 1
    if split:
        parts = q.new_empty(num_splits, *q.shape, dtype=torch.float32)
        part_lse = q.new_empty(num_splits, *q.shape[:2], dtype=torch.float32)
    else:
        parts, part_lse = out[None], lse[None]
    block_d = triton.next_power_of_2(head_dim)
    _attention_kernel[num_requests * num_blocks, num_kv_heads, num_splits](
        q, k, v, cu_seqlens, k_pages, v_pages, page_tables,
        head_start.contiguous(), token_stride.contiguous(), head_len.contiguous(), parts, part_lse,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], k_pages.stride(0), v_pages.stride(0), page_tables.stride(0),
        parts.stride(0), part_lse.stride(0), num_blocks,
        scale=head_dim**-0.5 * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads,
        SHARING=sharing,
        HEAD_DIM=head_dim,
        SLOTS_PER_PAGE=k_pages.shape[1],
        ATTEND_FRESH=attend_fresh,
        CAUSAL=causal,
        WITH_LSE=split or return_lse,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        BLOCK_D=block_d,
        num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip
    if split:
        _combine_kernel[(q.shape[0] * num_heads,)](
            parts, part_lse, out, lse, parts.stride(0), part_lse.stride(0),
            HEAD_DIM=head_dim,
            NUM_SPLITS=num_splits,
            WITH_LSE=return_lse,
            BLOCK_S=triton.next_power_of_2(num_splits),
            BLOCK_D=block_d,
        )  # fmt: skip
    return out, lse


@_attend.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
    attend_fresh: bool,
    causal: bool,
    return_lse: bool,
    max_seqlen: int | None,
    max_head_len: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_results(q, return_lse)


def paged_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
    k_slots: torch.Tensor | None = None,
    v_slots: torch.Tensor | None = None,
    *,
    attend_fresh: bool,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula, in float64, a request and a head at a time: (out, lse). The pages are left as they are."""
    k_pages, v_pages = (_written(x, pages, slots) for x, pages, slots in ((k, k_pages, k_slots), (v, v_pages, v_slots)))
    slots_per_page = k_pages.shape[1]
    group = q.shape[1] // k.shape[1]
    out = q.new_zeros(q.shape, dtype=torch.float64)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for request, (start, stop) in enumerate(itertools.pairwise(torch.as_tensor(cu_seqlens).tolist())):
        for head in range(q.shape[1]):
            kv_head = head // group
            tokens = torch.arange(int(head_len[request, kv_head]), device=q.device)
            slots = head_start[request, kv_head] + tokens * token_stride[request]
            where = page_tables[request, slots // slots_per_page].long(), slots % slots_per_page
            keys, values = k_pages[where].double(), v_pages[where].double()
            i = torch.arange(stop - start, device=q.device)[:, None]
            num_hidden = stop - start if causal and not attend_fresh else 0
            visible = tokens <= len(tokens) - num_hidden + i
            if attend_fresh:
                keys = torch.cat((keys, k[start:stop, kv_head].double()))
                values = torch.cat((values, v[start:stop, kv_head].double()))
                visible = torch.cat((visible, (i >= i.T) | (not causal)), dim=1)
            scores = (q[start:stop, head].double() @ keys.T) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(~visible, -torch.inf)
            lse[start:stop, head] = scores.logsumexp(dim=-1)
            weights = (scores - lse[start:stop, head, None]).exp().nan_to_num(0.0)
            out[start:stop, head] = weights @ values
    return out, lse


def _written(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    """A copy of ``pages`` with ``values`` written to ``slots``, one at a time."""
    pages = pages.clone()
    if slots is not None:
        for row, head in (slots >= 0).nonzero().tolist():
            page, offset = divmod(int(slots[row, head]), pages.shape[1])
            pages[page, offset] = values[row, head]
    return pages


def _equal_groups(
    bounds: list[int],
    k_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
) -> dict[tuple[int, int | None], list[int]]:
    """Requests by (rows, retained tokens); None for those whose retained tokens do not fill whole pages in order."""
    num_kv_heads = head_len.shape[1]
    capacity = page_tables.shape[1] * k_pages.shape[1]
    whole_tokens = k_pages.shape[1] % num_kv_heads == 0
    token_major = list(range(num_kv_heads))
    groups: dict[tuple[int, int | None], list[int]] = {}
    layout = zip(head_start.tolist(), token_stride.tolist(), head_len.tolist(), strict=True)
    for request, (starts, stride, lengths) in enumerate(layout):
        num_rows = bounds[request + 1] - bounds[request]
        if not num_rows:
            continue
        end = max((start + (n - 1) * stride + 1 for start, n in zip(starts, lengths, strict=True) if n), default=0)
        if end > capacity:
            raise ValueError(f"request {request} retains tokens up to slot {end} of page tables of {capacity} slots")
        uniform = lengths == [lengths[0]] * num_kv_heads
        in_order = uniform and whole_tokens and stride == num_kv_heads and starts == token_major
        groups.setdefault((num_rows, lengths[0] if in_order or not end else None), []).append(request)
    return groups


def _rows(bounds: list[int], members: list[int], length: int) -> slice | torch.Tensor:
    """The rows of requests of equal length; a slice where they follow each other."""
    starts = [bounds[request] for request in members]
    if starts == list(range(starts[0], starts[0] + len(starts) * length, length)):
        return slice(starts[0], starts[0] + len(starts) * length)
    return (torch.tensor(starts)[:, None] + torch.arange(length)).flatten()


def _requests_per_part(num_tokens: int, k: torch.Tensor) -> int:
    """How many requests of ``num_tokens`` keys and values each a CPU attends to at once.

    So many that the copies of their keys and values stay in the cores' caches until the attention has read them, and
    that every thread has a head to work on.
    """
    num_threads, (_, num_kv_heads, head_dim) = torch.get_num_threads(), k.shape
    bytes_per_request = 2 * num_tokens * num_kv_heads * head_dim * k.element_size()
    return max(1, num_threads * _COPIED_BYTES // bytes_per_request, -(-num_threads // num_kv_heads))


def _gather_whole_pages(
    fresh: torch.Tensor,
    pages: torch.Tensor,
    page_tables: torch.Tensor,
    members: list[int],
    retained: int,
    copies: torch.Tensor,
) -> torch.Tensor:
    """``fresh`` ``[group, fresh rows, num_kv_heads, head_dim]`` and after it the pages' first ``retained`` tokens.

    Whole pages are copied behind the fresh rows, where what the last page holds beyond the retained tokens falls off
    the end: one copy, and no mask. ``copies`` is where to: ``[group or more, fresh rows and tokens of whole pages,
    num_kv_heads, head_dim]``.
    """
    joined, num_fresh = copies[: len(members)], fresh.shape[1]
    joined[:, :num_fresh] = fresh
    num_pages = -(-retained * fresh.shape[2] // pages.shape[1])
    for target, request in zip(joined[:, num_fresh:].unbind(), members, strict=True):
        torch.index_select(pages, 0, page_tables[request, :num_pages], out=target.view(-1, *pages.shape[1:]))
    return joined[:, : num_fresh + retained]


def _gather_ragged(
    fresh_k: torch.Tensor,
    fresh_v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values, fresh ones first, of requests whose heads retain tokens of their own, and which of them exist.

    ``[group, fresh rows and longest head, num_kv_heads, head_dim]`` twice, with zeros where there is none, and bool
    ``[group, num_kv_heads, 1, fresh rows and longest head]``.
    """
    slots_per_page = k_pages.shape[1]
    tokens = torch.arange(int(head_len.max()))[None, :, None]
    exists = tokens < head_len[:, None]
    virtual = torch.where(exists, head_start[:, None] + tokens * token_stride[:, None, None], 0)
    pages = page_tables.gather(1, (virtual // slots_per_page).flatten(1)).view_as(virtual).long()
    # Of what does not exist: any page that is there.
    where = torch.where(exists, pages, 0), virtual % slots_per_page
    absent = ~exists[..., None]
    keys = torch.cat((fresh_k, k_pages[where].masked_fill_(absent, 0)), dim=1)
    values = torch.cat((fresh_v, v_pages[where].masked_fill_(absent, 0)), dim=1)
    visible = F.pad(exists.transpose(1, 2), (fresh_k.shape[1], 0), value=True)[:, :, None]
    return keys, values, visible


def _causal(length: int, num_keys: int, head_len: torch.Tensor, attend_fresh: bool) -> torch.Tensor:
    """Which keys (fresh ones first) a row sees: ``[group or 1, num_kv_heads or 1, length, num_keys]``.

    ``head_len``: of the group, ``[group, num_kv_heads]``.
    """
    row, key = torch.arange(length)[:, None], torch.arange(num_keys)
    if attend_fresh:
        return ((key <= row) | (key >= length))[None, None]
    return key <= head_len[:, :, None, None] - length + row


def _softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend within each member of a group.

    Args:
        q: ``[group, num_rows, num_heads, head_dim]``.
        k, v: ``[group, num_keys, num_kv_heads, head_dim]``.
        visible: bool, broadcast to ``[group, num_kv_heads, num_rows, num_keys]``; None: everything.

    Returns:
        ``[group, num_rows, num_heads, head_dim]`` and, where asked for, float32 ``[group, num_rows, num_heads]``.
    """
    group, num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    sharing = num_heads // num_kv_heads
    # Query heads that share a KV head become further rows of it, so that K and V are not expanded.
    queries = q.view(group, num_rows, num_kv_heads, sharing, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    if visible is not None and visible.shape[2] > 1:
        visible = visible.repeat(1, 1, sharing, 1)

    def per_query_head(x: torch.Tensor) -> torch.Tensor:
        return x.view(group, num_kv_heads, sharing, num_rows, x.shape[3]).flatten(1, 2).transpose(1, 2)

    if return_lse and visible is None and k.shape[1]:
        # What scaled_dot_product_attention calls on a CPU; only by this name does it tell the denominators. Scores of
        # all rows and keys are never held at once.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values)
        return per_query_head(out), per_query_head(lse[..., None].float())[..., 0]
    if return_lse:
        scores = queries.float() @ keys.float().transpose(2, 3) * head_dim**-0.5
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        lse = scores.logsumexp(dim=-1, keepdim=True)
        weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)).exp()
        return per_query_head((weights @ values.float()).to(q.dtype)), per_query_head(lse)[..., 0]
    if not k.shape[1]:
        return torch.zeros_like(q), None
    # Gives zeros where nothing is visible.
    return per_query_head(F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)), None


def _tiles(num_pairs: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(queries per program, keys per tile, warps, stages) for ``num_pairs`` (row, query head) pairs of a KV head.

    As large as leaves registers to spare; at most 96 KiB of shared memory, which every GPU since 2020 has.
    """
    if dtype == torch.float32:
        limit, block_k, num_stages = 32 if head_dim <= 64 else 16, 32, 1
    elif head_dim > 128:
        limit, block_k, num_stages = 64, 32, 2
    else:
        limit, block_k, num_stages = 128, 64, 2
    block_q = min(max(16, triton.next_power_of_2(num_pairs)), limit)
    return block_q, block_k, 8 if head_dim > 128 or block_q > 64 else 4, num_stages


def _num_splits(num_programs: int, num_tiles: int, device: torch.device) -> int:
    """Programs that share the keys of a row, so that two per multiprocessor run; each gets two tiles at least."""
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(wanted // num_programs, num_tiles // 2, 32))


def _empty_results(q: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not belong together")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads")
    if k_pages.dim() != 3 or k_pages.shape != v_pages.shape or k_pages.shape[2] != q.shape[2]:
        raise ValueError(
            f"k_pages {list(k_pages.shape)}, v_pages {list(v_pages.shape)} and q {list(q.shape)} do not belong together"
        )
    if k_pages.stride()[1:] != (q.shape[2], 1) or v_pages.stride()[1:] != (q.shape[2], 1):
        raise ValueError(f"a page is not contiguous: k_pages {k_pages.stride()}, v_pages {v_pages.stride()} in strides")
    if len({x.dtype for x in (q, k, v, k_pages, v_pages)}) > 1:
        raise ValueError(f"q, k, v and the pages differ in type: {[x.dtype for x in (q, k, v, k_pages, v_pages)]}")
    num_requests = cu_seqlens.numel() - 1
    per_head = (num_requests, k.shape[1])
    if (
        page_tables.dim() != 2
        or page_tables.shape[0] != num_requests
        or head_start.shape != per_head
        or head_len.shape != per_head
        or token_stride.shape != (num_requests,)
    ):
        raise ValueError(
            f"for {num_requests} requests and {k.shape[1]} KV heads, page_tables {list(page_tables.shape)}, "
            f"head_start {list(head_start.shape)}, token_stride {list(token_stride.shape)} and "
            f"head_len {list(head_len.shape)} do not fit"
        )


def _check_slots(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    if values.dim() != 3 or pages.dim() != 3 or values.shape[2] != pages.shape[2] or slots.shape != values.shape[:2]:
        raise ValueError(
            f"values {list(values.shape)}, pages {list(pages.shape)}, slots {list(slots.shape)} do not belong together"
        )
