r"""Choosing the tokens a layer retains and moving their K/V into pages (Sparse-dLLM, Algorithms 3 and 4).

With the block's queries after RoPE, q_{i,h} for rows i of n, and candidates' keys k_{j,g}, where query head h reads KV
head g(h):

    score_j = Σ_h q̄_h · k_{j,g(h)},   q̄_h = (1/n) Σ_i q_{i,h}
            = Σ_g (Σ_{h: g(h)=g} q̄_h) · k_{j,g}

so the queries shrink to one vector of num_kv_heads · head_dim numbers, and scoring is one matrix-vector product. Scores
are max-pooled over the sequence of candidates, and the ``count`` highest are retained, in ascending order. Their keys
and values go to the slots 0, 1, … of the request's table, token-major.
"""

import torch
import torch.nn.functional as F

from dllm_engine.kernels._operator import operator


@operator("mean_query_scores", triton="eviction")
def mean_query_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """How much the block attends to each candidate, before any scale or softmax.

    The score is a sum over the heads of this rank. For the mean of Algorithm 3, tensor-parallel ranks add theirs and
    divide by the number of query heads of the whole model.

    Args:
        q: the block's queries, ``[block_rows, num_heads, head_dim]``.
        k: ``[num_candidates, num_kv_heads, head_dim]``. Rows are independent, so scoring the whole canvas and dropping
            the block's scores saves a copy of the keys.

    Returns:
        float32 ``[num_candidates]``.

    Raises:
        ValueError: shapes that do not belong together.
    """
    mean = q.float().mean(dim=0).unflatten(0, (k.shape[1], -1)).sum(dim=1)
    return k.flatten(1).float() @ mean.flatten()


@mean_query_scores.register_fake
def _(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k.new_empty(k.shape[0], dtype=torch.float32)


@mean_query_scores.register_check
def _(q: torch.Tensor, k: torch.Tensor) -> None:
    if q.dim() != 3 or k.dim() != 3 or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)} do not belong together")
    if not q.shape[0]:
        raise ValueError(f"q {list(q.shape)} has no rows to average")


def max_pooled(scores: torch.Tensor, width: int) -> torch.Tensor:
    """Scores ``[rows, tokens]`` where each token counts as the best within ``width // 2`` places; ``width`` is odd."""
    return scores if width == 1 else F.max_pool1d(scores, width, stride=1, padding=width // 2)


def select_retained(scores: torch.Tensor, count: int, pool_kernel_size: int) -> torch.Tensor:
    """The candidates to retain.

    Pooling makes neighbours equal, so the last place is often a tie, which ``torch.topk`` decides.

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


@operator("write_retained", mutates=("k_pages", "v_pages"), triton="eviction")
def write_retained(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    first_token: int = 0,
) -> None:
    """Append ``k[rows]`` and ``v[rows]`` to the tokens in one request's pages, token-major.

    Args:
        k, v: ``[num_rows, num_kv_heads, head_dim]``.
        rows: int64 ``[num_retained]``.
        k_pages, v_pages: ``[num_pages, slots_per_page, head_dim]``.
        page_table: int32 or int64 ``[pages of the request]``, at least as many as the tokens need.
        first_token: how many tokens the pages hold already; 0 overwrites them from the first slot on.

    Raises:
        ValueError: shapes that do not belong together, or a table too short.
    """
    num_slots, slots_per_page = rows.shape[0] * k.shape[1], k_pages.shape[1]
    page, offset = divmod(first_token * k.shape[1], slots_per_page)
    # First the rest of a page that is partly full, then whole pages, then the start of the last page.
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


@write_retained.register_check
def _(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    first_token: int = 0,
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
