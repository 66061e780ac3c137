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


@torch.library.custom_op("dllm::mean_query_scores", mutates_args=(), device_types="cpu")
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
    return k.flatten(1).float() @ _mean_query(q, k.shape[1])


@mean_query_scores.register_fake
def _(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k.new_empty(k.shape[0], dtype=torch.float32)


def mean_query_scores_reference(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The formula, in float64."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.einsum("hd,jhd->j", q.double().mean(dim=0), keys)


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
    if pool_kernel_size > 1 and count:
        pooled = F.max_pool1d(scores[None], pool_kernel_size, stride=1, padding=pool_kernel_size // 2)
        scores = pooled[0]
    return scores.topk(count).indices.sort().values


@torch.library.custom_op("dllm::write_retained", mutates_args=("k_pages", "v_pages"), device_types="cpu")
def write_retained(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Copy ``k[rows]`` and ``v[rows]`` to slots 0, 1, … of one request's table, token-major.

    Args:
        k, v: ``[num_rows, num_kv_heads, head_dim]``.
        rows: int64 ``[num_retained]``.
        k_pages, v_pages: ``[num_pages, slots_per_page, head_dim]``.
        page_table: int32 or int64 ``[pages of the request]``, at least as many as the rows need.

    Raises:
        ValueError: shapes that do not belong together, or a table too short.
    """
    _check_written(k, v, rows, k_pages, v_pages, page_table)
    slots_per_page = k_pages.shape[1]
    slots = torch.arange(rows.shape[0] * k.shape[1])
    whole = rows.shape[0] * k.shape[1] // slots_per_page * slots_per_page
    page, offset = page_table[slots[whole:] // slots_per_page].long(), slots[whole:] % slots_per_page
    for values, pages in ((k, k_pages), (v, v_pages)):
        retained = values[rows].flatten(0, 1)
        full_pages = retained[:whole].view(-1, *pages.shape[1:])
        pages.index_copy_(0, page_table[: len(full_pages)].long(), full_pages)
        pages[page, offset] = retained[whole:]


@write_retained.register_fake
def _(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    _check_written(k, v, rows, k_pages, v_pages, page_table)


def write_retained_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the pages, written a slot at a time."""
    k_pages, v_pages = k_pages.clone(), v_pages.clone()
    for token, row in enumerate(rows.tolist()):
        for head in range(k.shape[1]):
            index, offset = divmod(token * k.shape[1] + head, k_pages.shape[1])
            k_pages[int(page_table[index]), offset] = k[row, head]
            v_pages[int(page_table[index]), offset] = v[row, head]
    return k_pages, v_pages


def _mean_query(q: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Mean over rows, summed over the query heads of each KV head: float32 ``[num_kv_heads · head_dim]``."""
    return q.float().mean(dim=0).unflatten(0, (num_kv_heads, -1)).sum(dim=1).flatten()


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
) -> None:
    if k.dim() != 3 or k.shape != v.shape or rows.dim() != 1:
        raise ValueError(f"k {list(k.shape)}, v {list(v.shape)}, rows {list(rows.shape)} do not belong together")
    if k_pages.dim() != 3 or k_pages.shape != v_pages.shape or k_pages.shape[2] != k.shape[2]:
        raise ValueError(
            f"k_pages {list(k_pages.shape)}, v_pages {list(v_pages.shape)} do not belong together and to k {list(k.shape)}"
        )
    if page_table.dim() != 1 or page_table.shape[0] * k_pages.shape[1] < rows.shape[0] * k.shape[1]:
        raise ValueError(
            f"a page table {list(page_table.shape)} of pages of {k_pages.shape[1]} slots cannot hold {rows.shape[0]} "
            f"tokens of {k.shape[1]} KV heads"
        )
