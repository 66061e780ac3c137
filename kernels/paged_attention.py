r"""Attention of a batch's rows to tokens in pages (``PagedTokens``), and to their own keys and values.

With K_h, V_h the keys and values that request r has in pages for KV head h and, with ``attend_fresh``, those of its own
rows R_r as well:

    out_i = Σ_j exp(s_ij − lse_i) v_j,   s_ij = q_i · k_j / √d,   lse_i = log Σ_j exp(s_ij),   i ∈ R_r

A row i with a limit sees the keys j < limit_i alone; a request's tokens in pages come first, its rows behind them.
Query heads share KV heads in consecutive groups. A row with nothing to attend to has out = 0 and lse = −∞.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from dllm_engine.kernels._operator import operator
from dllm_engine.kernels.paged_tokens import PagedTokens

PagedFlash = Callable[[torch.Tensor, torch.Tensor, PagedTokens, int], torch.Tensor]
"""Computes ``paged_attention`` of queries, ``cu_seqlens``, tokens with ``token_lens``, and ``max_seqlen``: to pages
alone, without limits. Rows of a request without tokens are undefined."""
_flash: PagedFlash | None = None


def use_paged_flash(attend: PagedFlash | None) -> None:
    """Let ``attend`` compute in this process what it can of ``paged_attention``; at first there is none."""
    global _flash
    _flash = attend


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    tokens: PagedTokens,
    *,
    attend_fresh: bool,
    limits: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each request's rows to its tokens in pages.

    Args:
        q: ``[num_rows, num_heads, head_dim]``.
        k, v: the rows' own keys and values, ``[num_rows, num_kv_heads, head_dim]``.
        cu_seqlens: first row of each request and, last, where rows end; int32 ``[num_requests + 1]``. The results of
            rows behind these are undefined.
        attend_fresh: attend to the request's own rows as well; otherwise to its pages alone.
        limits: how many of its request's keys each row sees, int32 ``[num_rows]``: of the tokens in pages, and with
            ``attend_fresh`` of the request's rows behind them. It may be more than there are. None: all of them.
        max_seqlen: an upper bound of the rows per request. A CUDA launch needs it, and without it waits for the device
            to tell. A captured launch stays correct for all tables within this bound.
        lse: where to write the logarithm of each softmax's denominator; contiguous float32 ``[num_rows, num_heads]``.

    Returns:
        ``[num_rows, num_heads, head_dim]``.

    Raises:
        ValueError: shapes, types or lengths that do not fit together.
    """
    if not isinstance(cu_seqlens, torch.Tensor):
        if max_seqlen is None:
            max_seqlen = max((stop - start for start, stop in itertools.pairwise(cu_seqlens)), default=0)
        cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32, device=q.device)
    _check(q, k, v, cu_seqlens, limits, tokens, lse)
    if (
        _flash is not None
        and not attend_fresh
        and limits is None
        and lse is None
        and max_seqlen is not None
        and tokens.token_lens is not None
    ):
        return _flash(q, cu_seqlens, tokens, max_seqlen)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    tensors = list(tokens[:6])
    _paged_attention(out, lse, q, k, v, cu_seqlens, limits, tensors, tokens.max_head_len, attend_fresh, max_seqlen)
    return out


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bidirectional attention within each sequence, and the logarithm of each softmax's denominator.

    Arguments as of ``bidirectional_attention``; returns ``[num_rows, num_heads, head_dim]`` and float32
    ``[num_rows, num_heads]``.
    """
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return paged_attention(q, k, v, cu_seqlens, _nothing(k, len(cu_seqlens) - 1), attend_fresh=True, lse=lse), lse


def attention_with_limits(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    limits: torch.Tensor | None,
    max_seqlen: int,
) -> torch.Tensor:
    """Attention within each sequence, where a row sees as many of its sequence's rows as ``limits`` says; None: all.

    Arguments and result as of ``paged_attention``.
    """
    nothing = _nothing(k, cu_seqlens.shape[0] - 1)
    return paged_attention(q, k, v, cu_seqlens, nothing, attend_fresh=True, limits=limits, max_seqlen=max_seqlen)


def _nothing(k: torch.Tensor, num_requests: int) -> PagedTokens:
    """No tokens in pages."""
    no_page = k.new_empty(1, *k.shape[1:])
    per_head = torch.zeros(num_requests, k.shape[1], dtype=torch.int32, device=k.device)
    return PagedTokens(
        no_page, no_page, per_head, per_head, per_head.flatten()[:num_requests], per_head, max_head_len=0
    )


@operator("paged_attention:paged_attention")
def _paged_attention(
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
) -> None:
    """``out`` is contiguous. ``paged``: the tensors of ``PagedTokens`` that say where its tokens lie."""
    bounds, num_kv_heads = cu_seqlens.tolist(), paged[-1].shape[1]
    if bounds[0] != 0 or bounds[-1] > q.shape[0] or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens={bounds} does not divide {q.shape[0]} rows")
    for request, (first, last) in enumerate(itertools.pairwise(bounds)):
        if first == last:
            continue
        keys, values, numbers = _retained(request, *paged)
        if attend_fresh:
            own = paged[-1][request, :, None] + torch.arange(last - first)  # behind the tokens in pages
            keys, values = (torch.cat((x, y[first:last].transpose(0, 1)), 1) for x, y in ((keys, k), (values, v)))
            numbers = torch.cat((numbers, own), 1)
        for start in range(first, last, _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, last))
            limit = None if limits is None else limits[rows]
            # Query heads that share a KV head are further rows of it.
            queries = q[rows].unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
            attended, denominators = _attend(queries, keys, values, numbers, limit, with_lse=lse is not None)
            out[rows] = attended.permute(2, 0, 1, 3).flatten(1, 2)
            if lse is not None:
                lse[rows] = denominators.permute(2, 0, 1).flatten(1)


_ROWS_AT_ONCE = 128
"""Rows of a request whose masks or scores a CPU holds at once."""
_NO_KEY = torch.iinfo(torch.int32).max


def _retained(
    request: int,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of a request's tokens in pages, ``[num_kv_heads, longest head, head_dim]``, and their numbers in
    the request, ``[num_kv_heads, longest head]``. Where a head is shorter, they are zeros, and the number is that of no
    key."""
    slots_per_page, table, lengths = k_pages.shape[1], page_tables[request], head_len[request, :, None]
    numbers = torch.arange(int(lengths.max())).expand(len(lengths), -1)
    exists = numbers < lengths
    slots = torch.where(exists, head_start[request, :, None] + numbers * token_stride[request], 0)
    if slots.numel() and int(slots.max()) >= table.numel() * slots_per_page:
        raise ValueError(
            f"request {request} retains tokens up to slot {int(slots.max()) + 1} of page tables of "
            f"{table.numel() * slots_per_page} slots"
        )
    pages = torch.where(exists, table[slots // slots_per_page], 0)
    # Slots without a token may hold NaN.
    keys, values = (x[pages, slots % slots_per_page].masked_fill_(~exists[..., None], 0) for x in (k_pages, v_pages))
    return keys, values, numbers.masked_fill(~exists, _NO_KEY)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    numbers: torch.Tensor,
    limits: torch.Tensor | None,
    *,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries ``[num_kv_heads, sharing, num_rows, head_dim]`` to keys whose ``numbers`` are below the
    rows' ``limits``; and the logarithms of the denominators, float32 ``[num_kv_heads, sharing, num_rows]``, if asked
    for."""
    bounds = torch.full((q.shape[2],), _NO_KEY) if limits is None else limits
    visible = numbers[:, None] < bounds[:, None]
    mask = None if visible.all() else visible.repeat(1, q.shape[1], 1)
    rows = q.flatten(1, 2)
    if with_lse:
        scores = rows.float() @ k.float().transpose(1, 2) * q.shape[3] ** -0.5
        if mask is not None:
            scores.masked_fill_(~mask, -torch.inf)
        lse = scores.logsumexp(dim=-1, keepdim=True)
        weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)).exp_()
        return (weights @ v.float()).to(q.dtype).view_as(q), lse.view(q.shape[:3])
    if not k.shape[1]:
        return torch.zeros_like(q), q
    # Gives zeros where nothing is visible.
    attended = F.scaled_dot_product_attention(rows[None], k[None], v[None], None if mask is None else mask[None])
    return attended.view_as(q), q


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    limits: torch.Tensor | None,
    tokens: PagedTokens,
    lse: torch.Tensor | None,
) -> None:
    # Every layer of every step comes here, so each shape is asked for once.
    k_pages, v_pages, page_tables, head_start, token_stride, head_len = tokens[:6]
    q_shape, k_shape, pages_shape = q.shape, k.shape, k_pages.shape
    num_kv_heads = k_shape[1] if len(k_shape) == 3 else 0
    if len(q_shape) != 3 or not num_kv_heads or k_shape != v.shape or k_shape != (q_shape[0], num_kv_heads, q_shape[2]):
        raise ValueError(f"q {list(q_shape)}, k {list(k_shape)}, v {list(v.shape)} do not belong together")
    _, num_heads, head_dim = q_shape
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if len(pages_shape) != 3 or pages_shape != v_pages.shape or pages_shape[2] != head_dim:
        raise ValueError(
            f"k_pages {list(pages_shape)}, v_pages {list(v_pages.shape)} and q {list(q_shape)} do not belong together"
        )
    for page, slot, dim in (k_pages.stride(), v_pages.stride()):
        if slot != head_dim or dim != 1 or page % head_dim:
            raise ValueError(
                f"a page is not contiguous, or pages do not lie whole slots apart: k_pages {k_pages.stride()}, "
                f"v_pages {v_pages.stride()} in strides"
            )
    if not (q.dtype == k.dtype == v.dtype == k_pages.dtype == v_pages.dtype):
        raise ValueError(f"q, k, v and the pages differ in type: {[x.dtype for x in (q, k, v, k_pages, v_pages)]}")
    if limits is not None and (limits.shape != q_shape[:1] or limits.dtype != torch.int32 or limits.stride() != (1,)):
        raise ValueError(f"limits {limits.dtype} {list(limits.shape)} are not contiguous int32 [{q_shape[0]}]")
    if lse is not None and (lse.shape != q_shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous()):
        raise ValueError(f"lse {lse.dtype} {list(lse.shape)} is not contiguous float32 {list(q_shape[:2])}")
    num_requests = cu_seqlens.shape[0] - 1
    per_head, tables_shape = (num_requests, num_kv_heads), page_tables.shape
    if (
        len(tables_shape) != 2
        or tables_shape[0] != num_requests
        or head_start.shape != per_head
        or head_len.shape != per_head
        or token_stride.shape != (num_requests,)
    ):
        raise ValueError(
            f"for {num_requests} requests and {num_kv_heads} KV heads, page_tables {list(tables_shape)}, "
            f"head_start {list(head_start.shape)}, token_stride {list(token_stride.shape)} and "
            f"head_len {list(head_len.shape)} do not fit"
        )
    if tokens.token_lens is not None and tokens.token_lens.shape != (num_requests,):
        raise ValueError(f"token_lens {list(tokens.token_lens.shape)} does not fit {num_requests} requests")
    for numbers in (cu_seqlens, page_tables, head_start, token_stride, head_len):
        if numbers.dtype != torch.int32 or not numbers.is_contiguous():
            raise ValueError(
                f"cu_seqlens, page_tables, head_start, token_stride and head_len must be contiguous int32; one is "
                f"{numbers.dtype} {list(numbers.shape)} with strides {numbers.stride()}"
            )
