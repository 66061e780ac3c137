"""Attention over pages, on CUDA devices."""

import functools
import math

import torch

import triton
import triton.language as tl
from dllm_engine.kernels.triton._launch import Launch
from dllm_engine.kernels.triton.tiles import MAX_SPLITS, Tiles, choose_splits, choose_tiles

# The arguments of Triton kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs


@triton.jit(
    do_not_specialize=["q_row", "k_row", "v_row", "k_page", "v_page", "table_row", "total_rows", "num_blocks"],
    do_not_specialize_on_alignment=["cu_seqlens", "limits", "page_tables", "head_start", "token_stride", "head_len"],
)
def _attention_kernel(
    q, k, v, cu_seqlens, limits, k_pages, v_pages, page_tables, head_start, token_stride, head_len, out, lse,
    q_row, k_row, v_row, k_page, v_page, table_row, total_rows, num_blocks,
    SCALE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS_PER_PAGE: tl.constexpr,
    ATTEND_FRESH: tl.constexpr,
    LIMITED: tl.constexpr,
    WITH_LSE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a block of a request's (row, query head) pairs that share a KV head, over one split of the keys.

    The keys of a request and head, retained then fresh, are a row of tiles of ``BLOCK_K``; split s of n takes the
    s-th n-th of the tiles. Rows lie ``q_row``, ``k_row`` and ``v_row`` heads apart, pages ``k_page`` and ``v_page``
    slots, so that the compiler knows vectors to be aligned, whatever the strides. ``SCALE`` includes log2(e), so that
    exponentials are powers of two.
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
    head = pair % SHARING
    dim = tl.arange(0, BLOCK_D)
    in_range = row < num_rows
    in_head = dim < HEAD_DIM
    # Where a request's rows begin may lie beyond 32 bits, not how far its rows are from there.
    first_row = start.to(tl.int64)
    first_q = q + (first_row * q_row + kv_head * SHARING) * HEAD_DIM
    tile_q = tl.load(
        first_q + (row * q_row + head)[:, None] * HEAD_DIM + dim[None, :],
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
    retained_stop, fresh_stop = tl.minimum(stop, num_retained_tiles), stop
    if LIMITED:
        # Tiles that no row of the block sees are left out.
        limit = tl.load(limits + first_row + row, mask=in_range, other=0)
        highest_limit = tl.max(limit, axis=0)
        retained_stop = tl.minimum(retained_stop, tl.cdiv(highest_limit, BLOCK_K))
        behind = tl.cdiv(tl.maximum(highest_limit - retained, 0), BLOCK_K)
        fresh_stop = tl.minimum(fresh_stop, num_retained_tiles + behind)

    highest = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    weighted = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    first_slot = tl.load(head_start + request * NUM_KV_HEADS + kv_head)
    stride = tl.load(token_stride + request)
    table = page_tables + request.to(tl.int64) * table_row
    token = first * BLOCK_K + tl.arange(0, BLOCK_K)
    page = tl.load(table + (first_slot + token * stride) // SLOTS_PER_PAGE, mask=token < retained, other=0)
    for tile in range(first, retained_stop):
        token = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        exists = token < retained
        offset = (first_slot + token * stride) % SLOTS_PER_PAGE
        keys = tl.load(
            k_pages + (page.to(tl.int64) * k_page + offset)[:, None] * HEAD_DIM + dim[None, :],
            mask=exists[:, None] & in_head[None, :],
            other=0.0,
        )
        values = tl.load(
            v_pages + (page.to(tl.int64) * v_page + offset)[:, None] * HEAD_DIM + dim[None, :],
            mask=exists[:, None] & in_head[None, :],
            other=0.0,
        )
        # The next tile's pages are known a tile ahead: the compiler lets loads overlap with arithmetic only where
        # their addresses do not wait for another load of the same tile.
        following = token + BLOCK_K
        page = tl.load(table + (first_slot + following * stride) // SLOTS_PER_PAGE, mask=following < retained, other=0)
        visible = exists[None, :] & in_range[:, None]
        if LIMITED:
            visible = visible & (token[None, :] < limit[:, None])
        highest, total, weighted = _accumulate(tile_q, keys, values, visible, highest, total, weighted, SCALE)

    if ATTEND_FRESH:
        fresh_k = k + (first_row * k_row + kv_head) * HEAD_DIM
        fresh_v = v + (first_row * v_row + kv_head) * HEAD_DIM
        for tile in range(tl.maximum(first, num_retained_tiles), fresh_stop):
            token = (tile - num_retained_tiles) * BLOCK_K + tl.arange(0, BLOCK_K)
            exists = token < num_rows
            keys = tl.load(
                fresh_k + (token * k_row)[:, None] * HEAD_DIM + dim[None, :],
                mask=exists[:, None] & in_head[None, :],
                other=0.0,
            )
            values = tl.load(
                fresh_v + (token * v_row)[:, None] * HEAD_DIM + dim[None, :],
                mask=exists[:, None] & in_head[None, :],
                other=0.0,
            )
            visible = exists[None, :] & in_range[:, None]
            if LIMITED:
                visible = visible & (retained + token[None, :] < limit[:, None])
            highest, total, weighted = _accumulate(tile_q, keys, values, visible, highest, total, weighted, SCALE)

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    # Results are contiguous: [splits, rows, heads, dims] and [splits, rows, heads].
    first_target = ((split.to(tl.int64) * total_rows + first_row) * NUM_KV_HEADS + kv_head) * SHARING
    target = row * NUM_KV_HEADS * SHARING + head
    tl.store(
        out + first_target * HEAD_DIM + target[:, None] * HEAD_DIM + dim[None, :],
        (weighted / total[:, None]).to(out.dtype.element_ty),
        mask=in_range[:, None] & in_head[None, :],
    )
    if WITH_LSE:
        natural = tl.where(empty, -float("inf"), (highest + tl.log2(total)) * 0.6931471805599453)
        tl.store(lse + first_target + target, natural, mask=in_range)


@triton.jit
def _accumulate(q, keys, values, visible, highest, total, weighted, scale):
    """One tile of the online softmax."""
    # float32 products in full precision: TF32 would lose what float32 was asked for.
    scores = tl.where(visible, tl.dot(q, tl.trans(keys), input_precision="ieee") * scale, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    # While nothing is visible the maximum is -inf, and -inf - -inf is not a number.
    shift = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(highest - shift)
    total = total * decay + tl.sum(weights, axis=1)
    product = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_highest, total, weighted * decay[:, None] + product


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    partial_out, partial_lse, out, lse, num_splits,
    HEAD_DIM: tl.constexpr,
    WITH_LSE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a row and query head; out = Σ_s exp(lse_s − lse) out_s."""
    target = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    part = split.to(tl.int64) * tl.num_programs(0) + target
    lses = tl.load(partial_lse + part, mask=split < num_splits, other=-float("inf"))
    highest = tl.max(lses, axis=0)
    shift = tl.where(highest == -float("inf"), 0.0, highest)
    weights = tl.exp(lses - shift)
    total = tl.sum(weights, axis=0)
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    parts = tl.load(
        partial_out + part[:, None] * HEAD_DIM + dim[None, :],
        mask=(split < num_splits)[:, None] & in_head[None, :],
        other=0.0,
    )
    combined = tl.sum(parts * weights[:, None], axis=0) / total
    tl.store(out + target * HEAD_DIM + dim, combined.to(out.dtype.element_ty), mask=in_head)
    if WITH_LSE:
        tl.store(lse + target, tl.where(empty, -float("inf"), shift + tl.log(total)))


def paged_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    limits: torch.Tensor | None,
    paged: list[torch.Tensor],
    max_head_len: int | None,
    attend_fresh: bool,
    max_seqlen: int | None,
    num_splits: int | None = None,
) -> None:
    """``num_splits`` programs, ``MAX_SPLITS`` at most, share the keys of a row (None: as many as fill the device)."""
    k_pages, v_pages, page_tables, head_start, token_stride, head_len = paged
    num_requests, num_kv_heads = head_len.shape
    num_rows, num_heads, head_dim = q.shape
    if not num_requests or not num_rows:
        return
    if max_seqlen is None:
        max_seqlen = int(cu_seqlens.diff().max())
    if max_head_len is None:
        max_head_len = int(head_len.max())
    q, q_row = _rows(q, head_dim)
    k, k_row = _rows(k, head_dim)
    v, v_row = _rows(v, head_dim)
    sharing = num_heads // num_kv_heads
    tiles = choose_tiles(max_seqlen * sharing, head_dim, q.dtype)
    num_blocks = -(-max_seqlen * sharing // tiles.block_q)
    if num_splits is None:
        num_keys = max_head_len + (max_seqlen if attend_fresh else 0)
        num_splits = choose_splits(num_requests * num_blocks * num_kv_heads, num_keys, q.device)
    split, with_lse = num_splits > 1, lse is not None
    if lse is None:
        lse = out  # a pointer that is not used
    parts, part_lse = out, lse
    if split:
        parts = q.new_empty(num_splits, num_rows, num_heads, head_dim, dtype=torch.float32)
        part_lse = q.new_empty(num_splits, num_rows, num_heads, dtype=torch.float32)
    row_launch, combining_launch = _launches(
        num_heads, num_kv_heads, head_dim, k_pages.shape[1], attend_fresh, limits is not None, with_lse, split,
        tiles, q.dtype, q.device, q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16, k_pages.data_ptr() % 16,
        v_pages.data_ptr() % 16,
    )  # fmt: skip
    row_launch(
        _attention_kernel, (num_requests * num_blocks, num_kv_heads, num_splits),
        q, k, v, cu_seqlens, cu_seqlens if limits is None else limits, k_pages, v_pages, page_tables, head_start,
        token_stride, head_len, parts, part_lse,
        q_row, k_row, v_row, k_pages.stride(0) // head_dim, v_pages.stride(0) // head_dim, page_tables.stride(0),
        num_rows, num_blocks,
    )  # fmt: skip
    if split:
        combining_launch(_combine_kernel, (num_rows * num_heads, 1, 1), parts, part_lse, out, lse, num_splits)


def _rows(x: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, int]:
    """``x`` ``[num_rows, heads, head_dim]`` with its heads side by side, and how many heads its rows lie apart."""
    row, head, dim = x.stride()
    if head != head_dim or dim != 1 or row % head_dim:
        x = x.contiguous()
        row = x.shape[1] * head_dim
    return x, row // head_dim


@functools.cache
def _launches(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    slots_per_page: int,
    attend_fresh: bool,
    limited: bool,
    return_lse: bool,
    split: bool,
    tiles: Tiles,
    *of_pointers: object,
) -> tuple[Launch, Launch]:
    """Launches of attention and of combining splits. ``of_pointers``: type, device and alignments."""
    block_d = max(16, triton.next_power_of_2(head_dim))  # the least that a matrix product takes
    attention = {
        "SCALE": head_dim**-0.5 * math.log2(math.e),
        "NUM_KV_HEADS": num_kv_heads,
        "SHARING": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "SLOTS_PER_PAGE": slots_per_page,
        "ATTEND_FRESH": attend_fresh,
        "LIMITED": limited,
        "WITH_LSE": split or return_lse,
        "BLOCK_Q": tiles.block_q,
        "BLOCK_K": tiles.block_k,
        "BLOCK_D": block_d,
    }
    combining = {"HEAD_DIM": head_dim, "WITH_LSE": return_lse, "BLOCK_S": MAX_SPLITS, "BLOCK_D": block_d}
    return Launch(attention, num_warps=tiles.num_warps, num_stages=tiles.num_stages), Launch(combining)
