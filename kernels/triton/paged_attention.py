"""Attention over pages, on CUDA devices."""

import functools
import math
from typing import Any, NamedTuple

import torch

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
LEAST_KEYS = 128
"""The fewest keys of a program that shares the keys of a row with others. Joining
results would take longer than reading fewer keys: 32 rows of 128 numbers in float32,
written and read, are half as many bytes as 128 keys and values in bfloat16."""
MOST_SHARED = 1024
"""The most programs of a launch, before it is split: a larger launch is not split,
because no GPU has so many multiprocessors.
"""


class Tiles(NamedTuple):
    """Tile of one program of the attention kernel, and its resources."""

    block_q: int
    """(row, query head) pairs."""
    block_k: int
    """Keys."""
    num_warps: int
    num_stages: int


@functools.cache
def choose_tiles(head_dim: int, dtype: torch.dtype) -> Tiles:
    """Tiles for any number of rows, so that blocks of all sizes share one compiled
    kernel.

    Few rows read for longer than they compute: two programs of 64 KiB of keys and
    values each fit a multiprocessor of 2022, four times what keeps its memory busy, and
    64 pairs are the fewest of a Hopper's matrix product. On an H200, none of nine tiles
    is faster for 8 or 64 requests of 32 rows; single requests take up to 1.2 times the
    fastest.
    """
    if dtype == torch.float32:
        # Four warps would spill what they accumulate.
        return Tiles(32 if head_dim <= 64 else 16, 32, 8 if head_dim > 32 else 4, 1)
    if head_dim > 128:
        return Tiles(64, 32, 8, 2)
    return Tiles(64, 64, 4, 3)


@functools.cache
def choose_splits(num_programs: int, num_keys: int, device: torch.device) -> int:
    """The most programs that share the keys of a row, if there are ``num_programs``
    without splits: so many that two programs in all run on each multiprocessor, which
    is how many fit.

    ``num_keys`` is an upper bound. Programs that would have fewer than ``LEAST_KEYS``
    keys do nothing.
    """
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(2 * num_multiprocessors // num_programs, num_keys // LEAST_KEYS))


@triton.jit(
    do_not_specialize=[
        "q_row",
        "k_row",
        "v_row",
        "k_page",
        "v_page",
        "table_row",
        "num_blocks",
    ],
    do_not_specialize_on_alignment=[
        "cu_seqlens",
        "limits",
        "page_tables",
        "head_start",
        "token_stride",
        "head_len",
        "lse",
        "counters",
    ],
)
def _attention_kernel(
    q,
    k,
    v,
    cu_seqlens,
    limits,
    k_pages,
    v_pages,
    page_tables,
    head_start,
    token_stride,
    head_len,
    out,
    lse,
    parts,
    counters,
    q_row,
    k_row,
    v_row,
    k_page,
    v_page,
    table_row,
    num_blocks,
    SCALE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS_PER_PAGE: tl.constexpr,
    ATTEND_FRESH: tl.constexpr,
    LIMITED: tl.constexpr,
    WITH_LSE: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: a block of a request's (row, query head) pairs that share a KV head,
    over one split of the keys.

    The keys of a request and head, retained then fresh, are a row of tiles of
    ``BLOCK_K``. The programs of the grid's last axis share the tiles. Each program
    takes ``LEAST_TILES`` or more, or does nothing. ``parts`` receives the result of
    each program. ``counters``, zero before and after a launch, tells which program
    finishes last. This program joins the parts, always in the same order.

    Rows lie ``q_row``, ``k_row`` and ``v_row`` heads apart, pages ``k_page`` and
    ``v_page`` slots, so that the compiler knows vectors to be aligned, whatever the
    strides. ``SCALE`` includes log2(e), so that exponentials are powers of two.
    """
    request = tl.program_id(0) // num_blocks
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    # All loads come before the first branch, so that they are under way at once.
    start = tl.load(cu_seqlens + request)
    stop = tl.load(cu_seqlens + request + 1)
    retained = tl.load(head_len + request * NUM_KV_HEADS + kv_head)
    first_slot = tl.load(head_start + request * NUM_KV_HEADS + kv_head)
    stride = tl.load(token_stride + request)
    num_rows = stop - start
    num_keys = retained
    if ATTEND_FRESH:
        num_keys += num_rows
    num_tiles = tl.cdiv(num_keys, BLOCK_K)
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, tl.num_programs(2)), LEAST_TILES)
    num_splits = tl.maximum(tl.cdiv(num_tiles, tiles_per_split), 1)
    first_pair = tl.program_id(0) % num_blocks * BLOCK_Q
    if (first_pair >= num_rows * SHARING) | (split >= num_splits):
        return
    place = tl.arange(0, BLOCK_Q)
    row = (first_pair + place) // SHARING
    head = (first_pair + place) % SHARING
    dim = tl.arange(0, BLOCK_D)
    in_range = row < num_rows
    in_head = dim < HEAD_DIM
    kept = in_range[:, None] & in_head[None, :]
    # The offset of a request's first row may exceed 32 bits. Offsets from there do not.
    first_row = start.to(tl.int64)
    first_q = q + (first_row * q_row + kv_head * SHARING) * HEAD_DIM
    tile_q = tl.load(
        first_q + (row * q_row + head)[:, None] * HEAD_DIM + dim[None, :],
        mask=kept,
        other=0.0,
    )

    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, num_tiles)
    if LIMITED:
        # Tiles that no row of the block sees are left out.
        limit = tl.load(limits + first_row + row, mask=in_range, other=0)
        last_tile = tl.minimum(last_tile, tl.cdiv(tl.max(limit, axis=0), BLOCK_K))
    table = page_tables + request.to(tl.int64) * table_row
    fresh_k = k + (first_row * k_row + kv_head) * HEAD_DIM
    fresh_v = v + (first_row * v_row + kv_head) * HEAD_DIM

    highest = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    weighted = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    token = first_tile * BLOCK_K + tl.arange(0, BLOCK_K)
    page = tl.load(
        table + (first_slot + token * stride) // SLOTS_PER_PAGE,
        mask=token < retained,
        other=0,
    )
    for tile in range(first_tile, last_tile):
        token = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        offset = (first_slot + token * stride) % SLOTS_PER_PAGE
        key = k_pages + (page.to(tl.int64) * k_page + offset) * HEAD_DIM
        value = v_pages + (page.to(tl.int64) * v_page + offset) * HEAD_DIM
        if ATTEND_FRESH:
            key = tl.where(
                token < retained, key, fresh_k + (token - retained) * k_row * HEAD_DIM
            )
            value = tl.where(
                token < retained, value, fresh_v + (token - retained) * v_row * HEAD_DIM
            )
        exists = token < num_keys
        loaded = exists[:, None] & in_head[None, :]
        keys = tl.load(key[:, None] + dim[None, :], mask=loaded, other=0.0)
        values = tl.load(value[:, None] + dim[None, :], mask=loaded, other=0.0)
        # The next tile's pages are known a tile ahead: the compiler lets loads overlap
        # with arithmetic only where their addresses do not wait for another load of the
        # same tile.
        following = token + BLOCK_K
        page = tl.load(
            table + (first_slot + following * stride) // SLOTS_PER_PAGE,
            mask=following < retained,
            other=0,
        )
        visible = exists[None, :] & in_range[:, None]
        if LIMITED:
            visible = visible & (token[None, :] < limit[:, None])
        highest, total, weighted = _accumulate(
            tile_q, keys, values, visible, highest, total, weighted, SCALE
        )

    # Results are contiguous: [rows, heads, dims] and [rows, heads].
    first_target = (first_row * NUM_KV_HEADS + kv_head) * SHARING
    target = row * NUM_KV_HEADS * SHARING + head
    results = out + first_target * HEAD_DIM + target[:, None] * HEAD_DIM + dim[None, :]
    lses = lse + first_target + target
    if num_splits == 1:
        _store(results, kept, lses, in_range, WITH_LSE, highest, total, weighted)
    else:
        block = tl.program_id(0) * NUM_KV_HEADS + kv_head
        first_part = block.to(tl.int64) * tl.num_programs(2)
        num_parts = tl.num_programs(0).to(tl.int64) * NUM_KV_HEADS * tl.num_programs(2)
        part = parts + (first_part * BLOCK_Q + place)[:, None] * HEAD_DIM + dim[None, :]
        part_lse = parts + num_parts * BLOCK_Q * HEAD_DIM + first_part * BLOCK_Q + place
        of_split = split * BLOCK_Q
        _store(
            part + of_split * HEAD_DIM,
            kept,
            part_lse + of_split,
            in_range,
            True,
            highest,
            total,
            weighted,
        )
        tl.debug_barrier()  # all stores of the program come before it is counted
        if tl.atomic_add(counters + block, 1, sem="acq_rel") == num_splits - 1:
            tl.store(counters + block, 0)
            highest = tl.full([BLOCK_Q], -float("inf"), tl.float32)
            total = tl.zeros([BLOCK_Q], tl.float32)
            weighted = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
            for _ in tl.range(0, num_splits, num_stages=3):
                # Read from the L2 cache, where the other programs' stores are.
                logarithm = (
                    tl.load(
                        part_lse,
                        mask=in_range,
                        other=-float("inf"),
                        cache_modifier=".cg",
                    )
                    * LOG2_E
                )
                values = tl.load(part, mask=kept, other=0.0, cache_modifier=".cg")
                new_highest = tl.maximum(highest, logarithm)
                shift = tl.where(new_highest == -float("inf"), 0.0, new_highest)
                weight = tl.exp2(logarithm - shift)
                decay = tl.exp2(highest - shift)
                total = total * decay + weight
                weighted = weighted * decay[:, None] + values * weight[:, None]
                highest = new_highest
                part += BLOCK_Q * HEAD_DIM
                part_lse += BLOCK_Q
            _store(results, kept, lses, in_range, WITH_LSE, highest, total, weighted)


@triton.jit
def _accumulate(q, keys, values, visible, highest, total, weighted, scale):
    """One tile of the online softmax."""
    # float32 products in full precision: with TF32, float32 would gain nothing.
    scores = tl.where(
        visible,
        tl.dot(q, tl.trans(keys), input_precision="ieee") * scale,
        -float("inf"),
    )
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    # While nothing is visible the maximum is -inf, and -inf - -inf is not a number.
    shift = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(highest - shift)
    total = total * decay + tl.sum(weights, axis=1)
    product = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_highest, total, weighted * decay[:, None] + product


@triton.jit
def _store(out, kept, lse, in_range, WITH_LSE: tl.constexpr, highest, total, weighted):
    """Store the results of an online softmax. They are 0 and −∞ for a row with nothing
    to attend to.
    """
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    tl.store(out, (weighted / total[:, None]).to(out.dtype.element_ty), mask=kept)
    if WITH_LSE:
        tl.store(
            lse,
            tl.where(empty, -float("inf"), (highest + tl.log2(total)) / LOG2_E),
            mask=in_range,
        )


_compiled: dict[tuple[object, ...], Any] = {}
"""Compiled kernels by their types, alignments and constants.
``_attention_kernel[grid](...)`` would search for the kernel in each call. With 30
arguments this takes the host 50 µs, longer than a small kernel runs."""


def paged_attention(q, k, v, cu_seqlens, tokens, limits, lse, attend_fresh, max_seqlen):
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    (
        k_pages,
        v_pages,
        page_tables,
        head_start,
        token_stride,
        head_len,
        max_head_len,
        _,
    ) = tokens
    num_requests, num_kv_heads = head_len.shape
    num_rows, num_heads, head_dim = q.shape
    assert k_pages.stride()[1:] == v_pages.stride()[1:] == (head_dim, 1)
    for numbers in (cu_seqlens, page_tables, head_start, token_stride, head_len):
        assert numbers.dtype == torch.int32
        assert numbers.is_contiguous()
    if not num_requests or not num_rows:
        return out
    q, q_row = _rows(q, head_dim)
    k, k_row = _rows(k, head_dim)
    v, v_row = _rows(v, head_dim)
    sharing = num_heads // num_kv_heads
    tiles = choose_tiles(head_dim, q.dtype)
    num_blocks = -(-max_seqlen * sharing // tiles.block_q)
    num_keys = max_head_len + (max_seqlen if attend_fresh else 0)
    num_splits = choose_splits(
        num_requests * num_blocks * num_kv_heads, num_keys, q.device
    )
    grid = num_requests * num_blocks, num_kv_heads, num_splits
    # Results of programs that share keys. Empty if none do.
    num_parts = math.prod(grid) * tiles.block_q if num_splits > 1 else 0
    parts = q.new_empty(num_parts * (head_dim + 1), dtype=torch.float32)
    arguments = (
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens if limits is None else limits,
        k_pages,
        v_pages,
        page_tables,
        head_start,
        token_stride,
        head_len,
        out,
        parts if lse is None else lse,
        parts,
        _counters(q.device),
        q_row,
        k_row,
        v_row,
        k_pages.stride(0) // head_dim,
        v_pages.stride(0) // head_dim,
        page_tables.stride(0),
        num_blocks,
    )
    constants = {
        "SCALE": head_dim**-0.5 * math.log2(math.e),
        "NUM_KV_HEADS": num_kv_heads,
        "SHARING": sharing,
        "HEAD_DIM": head_dim,
        "SLOTS_PER_PAGE": k_pages.shape[1],
        "ATTEND_FRESH": attend_fresh,
        "LIMITED": limits is not None,
        "WITH_LSE": lse is not None,
        "LEAST_TILES": -(-LEAST_KEYS // tiles.block_k),
        "BLOCK_Q": tiles.block_q,
        "BLOCK_K": tiles.block_k,
        # A matrix product needs at least this many. Not Triton's function for powers of
        # two, which takes the host 3 µs.
        "BLOCK_D": max(16, 1 << (head_dim - 1).bit_length()),
    }
    # The kernel specialises on no integer, and only on the alignment of these pointers.
    key = (
        *constants.values(),
        q.dtype,
        q.device,
        *(x.data_ptr() % 16 for x in (q, k, v, k_pages, v_pages)),
    )
    if (compiled := _compiled.get(key)) is not None:
        compiled[grid](*arguments, *constants.values())
    else:  # Triton's interpreter compiles nothing, so it launches here each time
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        _compiled[key] = _attention_kernel[grid](*arguments, **constants, **options)
    return out


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros that all launches on a device share: no two launches run at a time.
    Recorded launches keep using them.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first launch of paged_attention must not be recorded: its counters "
            "would not be zero"
        )
    return torch.zeros(MOST_SHARED, dtype=torch.int32, device=device)


def _rows(x: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, int]:
    """``x`` ``[num_rows, heads, head_dim]`` with the heads of a row side by side, and
    the distance between rows, in heads.
    """
    row, head, dim = x.stride()
    if head != head_dim or dim != 1 or row % head_dim:
        x = x.contiguous()
        row = x.shape[1] * head_dim
    return x, row // head_dim
