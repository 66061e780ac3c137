r"""Choosing the tokens a layer retains and moving their K/V into pages (Sparse-dLLM, Algorithms 3 and 4).

With the block's queries after RoPE, q_{i,h} for rows i of n, and candidates' keys k_{j,g}, where query head h reads KV
head g(h):

    score_j = Σ_h q̄_h · k_{j,g(h)},   q̄_h = (1/n) Σ_i q_{i,h}
            = Σ_g (Σ_{h: g(h)=g} q̄_h) · k_{j,g}

so the queries shrink to one vector of num_kv_heads · head_dim numbers and scoring is one matrix-vector product. Then a
max-pool over the sequence of candidates, the ``count`` highest, in ascending order; their keys and values go to the
slots 0, 1, … of the request's table, token-major.
"""

import torch
import torch.nn.functional as F

from dllm_engine.kernels._operator import operator
from dllm_engine.kernels._triton import jit, tl, triton

# The arguments of Triton kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs


@jit
def _mean_query_kernel(
    q, mean, num_rows, q_row, q_head,
    SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: Σ_h q̄_h over the query heads of a KV head."""
    kv_head = tl.program_id(0)
    dim = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_rows * SHARING, BLOCK_R):
        pair = first + tl.arange(0, BLOCK_R)
        head = kv_head * SHARING + pair % SHARING
        rows = tl.load(
            q + (pair // SHARING).to(tl.int64)[:, None] * q_row + head[:, None] * q_head + dim[None, :],
            mask=(pair < num_rows * SHARING)[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        total += tl.sum(rows.to(tl.float32), axis=0)
    tl.store(mean + kv_head * HEAD_DIM + dim, total / num_rows, mask=dim < HEAD_DIM)


@jit
def _score_kernel(
    mean, k, scores, num_candidates, k_row, k_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a block of candidates, all heads."""
    candidate = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    dim = tl.arange(0, BLOCK_D)
    in_range = candidate < num_candidates
    total = tl.zeros([BLOCK_C], tl.float32)
    for kv_head in range(NUM_KV_HEADS):
        query = tl.load(mean + kv_head * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
        keys = tl.load(
            k + candidate.to(tl.int64)[:, None] * k_row + kv_head * k_head + dim[None, :],
            mask=in_range[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        total += tl.sum(keys.to(tl.float32) * query[None, :], axis=1)
    tl.store(scores + candidate, total, mask=in_range)


@jit
def _write_retained_kernel(
    k, v, rows, k_pages, v_pages, page_table, first_token, k_row, k_head, v_row, v_head, k_page, v_page,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS_PER_PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: all heads of a retained token."""
    token = tl.program_id(0)
    row = tl.load(rows + token)
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    slot = (first_token + token) * NUM_KV_HEADS + head
    page = tl.load(page_table + slot // SLOTS_PER_PAGE, mask=head < NUM_KV_HEADS, other=0).to(tl.int64)
    offset = slot % SLOTS_PER_PAGE * HEAD_DIM
    mask = (head < NUM_KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    keys = tl.load(k + row * k_row + head[:, None] * k_head + dim[None, :], mask=mask)
    tl.store(k_pages + (page * k_page + offset)[:, None] + dim[None, :], keys, mask=mask)
    values = tl.load(v + row * v_row + head[:, None] * v_head + dim[None, :], mask=mask)
    tl.store(v_pages + (page * v_page + offset)[:, None] + dim[None, :], values, mask=mask)


@operator("mean_query_scores")
def mean_query_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """How much the block attends to each candidate, before any scale or softmax.

    A sum over the heads at hand: tensor-parallel ranks add theirs, and divide by the number of query heads of the
    whole model for the mean of Algorithm 3.

    Args:
        q: the block's queries, ``[block_rows, num_heads, head_dim]``.
        k: ``[num_candidates, num_kv_heads, head_dim]``. Rows are independent, so scoring the whole canvas and dropping
            the block's scores saves a copy of the keys.

    Returns:
        float32 ``[num_candidates]``.

    Raises:
        ValueError: shapes that do not belong together.
    """
    _check_scored(q, k)
    mean = q.float().mean(dim=0).unflatten(0, (k.shape[1], -1)).sum(dim=1)
    return k.flatten(1).float() @ mean.flatten()


@mean_query_scores.register_kernel("CUDA")
def mean_query_scores_with_triton(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    _check_scored(q, k)
    num_candidates, num_kv_heads, head_dim = k.shape
    scores = k.new_empty(num_candidates, dtype=torch.float32)
    if not num_candidates:
        return scores
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    mean = q.new_empty(num_kv_heads * head_dim, dtype=torch.float32)
    block_d = triton.next_power_of_2(head_dim)
    _mean_query_kernel[(num_kv_heads,)](
        q, mean, q.shape[0], *q.stride()[:2],
        SHARING=q.shape[1] // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_R=16,
        BLOCK_D=block_d,
    )  # fmt: skip
    block_c = 16
    _score_kernel[(triton.cdiv(num_candidates, block_c),)](
        mean, k, scores, num_candidates, *k.stride()[:2],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_C=block_c,
        BLOCK_D=block_d,
    )  # fmt: skip
    return scores


@mean_query_scores.register_fake
def _(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k.new_empty(k.shape[0], dtype=torch.float32)


def mean_query_scores_reference(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The formula, in float64."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.einsum("hd,jhd->j", q.double().mean(dim=0), keys)


def max_pooled(scores: torch.Tensor, width: int) -> torch.Tensor:
    """Scores ``[rows, tokens]`` where each token counts as the best within ``width // 2`` places; ``width`` is odd."""
    return scores if width == 1 else F.max_pool1d(scores, width, stride=1, padding=width // 2)


def select_retained(scores: torch.Tensor, count: int, pool_kernel_size: int) -> torch.Tensor:
    """The candidates to retain.

    Pooling makes neighbours equal, so the last place is often a tie; ``torch.topk`` settles it.

    Args:
        scores: ``[num_candidates]``.
        count: how many to retain.
        pool_kernel_size: odd; each candidate counts as the best within ``pool_kernel_size // 2`` places. 1: itself.

    Returns:
        int64 ``[count]``, ascending.

    Raises:
        ValueError: an even ``pool_kernel_size``, or ``count`` beyond the candidates.
    """
    if scores.dim() != 1 or not 0 <= count <= scores.shape[0]:
        raise ValueError(f"count={count} of scores {list(scores.shape)}: 0 to the number of candidates can be retained")
    if pool_kernel_size < 1 or pool_kernel_size % 2 == 0:
        raise ValueError(f"pool_kernel_size={pool_kernel_size} is not a positive odd number")
    if count:
        scores = max_pooled(scores[None], pool_kernel_size)[0]
    return scores.topk(count).indices.sort().values


@operator("write_retained", mutates=("k_pages", "v_pages"))
def write_retained(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    first_token: int = 0,
) -> None:
    """Copy ``k[rows]`` and ``v[rows]`` to one request's table, token-major, behind the tokens that it holds already.

    Args:
        k, v: ``[num_rows, num_kv_heads, head_dim]``.
        rows: int64 ``[num_retained]``.
        k_pages, v_pages: ``[num_pages, slots_per_page, head_dim]``.
        page_table: int32 or int64 ``[pages of the request]``, at least as many as the tokens need.
        first_token: how many tokens the table holds already; 0 overwrites from its first slot on.

    Raises:
        ValueError: shapes that do not belong together, or a table too short.
    """
    _check_written(k, v, rows, k_pages, v_pages, page_table, first_token)
    num_slots, slots_per_page = rows.shape[0] * k.shape[1], k_pages.shape[1]
    page, offset = divmod(first_token * k.shape[1], slots_per_page)
    # What completes a page that is partly full, then whole pages, then what is left.
    completing = min(-offset % slots_per_page, num_slots)
    num_whole, num_left = divmod(num_slots - completing, slots_per_page)
    table = page_table[page:].long()
    for values, pages in ((k, k_pages), (v, v_pages)):
        start, whole, left = values[rows].flatten(0, 1).split((completing, num_whole * slots_per_page, num_left))
        rest = table
        if completing:
            pages[table[0], offset : offset + completing] = start
            rest = table[1:]
        pages.index_copy_(0, rest[:num_whole], whole.view(num_whole, *pages.shape[1:]))
        if num_left:
            pages[rest[num_whole], :num_left] = left


@write_retained.register_kernel("CUDA")
def write_retained_with_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    first_token: int = 0,
) -> None:
    _check_written(k, v, rows, k_pages, v_pages, page_table, first_token)
    _, num_kv_heads, head_dim = k.shape
    if not rows.shape[0]:
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    _write_retained_kernel[(rows.shape[0],)](
        k, v, rows.contiguous(), k_pages, v_pages, page_table.contiguous(), first_token,
        *k.stride()[:2], *v.stride()[:2], k_pages.stride(0), v_pages.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        SLOTS_PER_PAGE=k_pages.shape[1],
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip


@write_retained.register_fake
def _(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    first_token: int = 0,
) -> None:
    _check_written(k, v, rows, k_pages, v_pages, page_table, first_token)


def write_retained_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    first_token: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the pages, written a slot at a time."""
    k_pages, v_pages = k_pages.clone(), v_pages.clone()
    for token, row in enumerate(rows.tolist(), start=first_token):
        for head in range(k.shape[1]):
            index, offset = divmod(token * k.shape[1] + head, k_pages.shape[1])
            k_pages[int(page_table[index]), offset] = k[row, head]
            v_pages[int(page_table[index]), offset] = v[row, head]
    return k_pages, v_pages


def _check_scored(q: torch.Tensor, k: torch.Tensor) -> None:
    if q.dim() != 3 or k.dim() != 3 or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)} do not belong together")
    if not q.shape[0]:
        raise ValueError(f"q {list(q.shape)} has no rows to average")


def _check_written(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    first_token: int,
) -> None:
    if k.dim() != 3 or k.shape != v.shape or rows.dim() != 1:
        raise ValueError(f"k {list(k.shape)}, v {list(v.shape)}, rows {list(rows.shape)} do not belong together")
    if k_pages.dim() != 3 or k_pages.shape != v_pages.shape or k_pages.shape[2] != k.shape[2]:
        raise ValueError(
            f"k_pages {list(k_pages.shape)}, v_pages {list(v_pages.shape)} and k {list(k.shape)} do not belong together"
        )
    if k_pages.stride()[1:] != (k.shape[2], 1) or v_pages.stride()[1:] != (k.shape[2], 1):
        raise ValueError(f"a page is not contiguous: k_pages {k_pages.stride()}, v_pages {v_pages.stride()} in strides")
    num_tokens = first_token + rows.shape[0]
    if page_table.dim() != 1 or page_table.shape[0] * k_pages.shape[1] < num_tokens * k.shape[1]:
        raise ValueError(
            f"a page table {list(page_table.shape)} of pages of {k_pages.shape[1]} slots cannot hold {num_tokens} "
            f"tokens of {k.shape[1]} KV heads"
        )
