"""Attention over pages, on CUDA devices."""

import math

import torch

import triton
import triton.language as tl
from dllm_engine.kernels.paged_attention import empty_results

# The arguments of Triton kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs


@triton.jit
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


@triton.jit
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


@triton.jit
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


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    paged: list[torch.Tensor],
    max_head_len: int | None,
    attend_fresh: bool,
    causal: bool,
    return_lse: bool,
    max_seqlen: int | None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``num_splits`` programs share the keys of a row (None: as many as fill the device)."""
    k_pages, v_pages, page_tables, head_start, token_stride, head_len = paged
    out, lse = empty_results(q, return_lse)
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
    block_d = max(16, triton.next_power_of_2(head_dim))  # the least that a matrix product takes
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
