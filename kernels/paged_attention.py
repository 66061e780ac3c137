r"""Attention of a batch's rows to tokens in pages (``PagedTokens``), and to their own
keys and values.

With K_h, V_h the keys and values that request r has in pages for KV head h and, with
``attend_fresh``, the keys and values of its own rows R_r as well:

    out_i = Σ_j exp(s_ij − lse_i) v_j,   s_ij = q_i · k_j / √d,   lse_i = log Σ_j
    exp(s_ij),   i ∈ R_r

A row i with a limit sees only the keys j < limit_i. They count a request's tokens in
pages first, then its rows. Query heads share KV heads in consecutive groups. A row with
nothing to attend to has out = 0 and lse = −∞.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_engine.kernels._operator import Operator


class PagedTokens(NamedTuple):
    """Keys and values that requests have in pages, in one layer.

    Request r has ``head_len[r, h]`` tokens for KV head h. Token t of head h lies in
    virtual slot ``head_start[r, h] + t · token_stride[r]``, and virtual slot σ in page
    ``page_tables[r, σ // slots_per_page]`` at offset ``σ % slots_per_page``. There are
    two layouts:

        token-major:  head_start[r, h] = h,  token_stride[r] = num_kv_heads;  grows by
        appending pages
        packed:       head_start[r, h] = Σ_{g<h} head_len[r, g],  token_stride[r] = 1;
        a range of slots per head

    Slots without a token are never used in arithmetic: they may hold NaN.
    """

    k_pages: Tensor
    """``[num_pages, slots_per_page, head_dim]``. A page is contiguous; pages may lie
    apart by whole slots.
    """
    v_pages: Tensor
    """As ``k_pages``."""
    page_tables: Tensor
    """int32 ``[num_requests, max_pages]``; entries beyond a request's pages are not
    read.
    """
    head_start: Tensor
    """int32 ``[num_requests, num_kv_heads]``"""
    token_stride: Tensor
    """int32 ``[num_requests]``"""
    head_len: Tensor
    """int32 ``[num_requests, num_kv_heads]``"""
    max_head_len: int
    """An upper bound of ``head_len``, known on the host. It only decides how finely a
    CUDA launch splits the work: a captured one stays correct for longer heads."""
    token_lens: Tensor | None = None
    """Tokens of each request, int32 ``[num_requests]``, contiguous, if the layout is
    token-major: all heads of a request then have equally many. None: either layout."""


PagedFlash = Callable[[Tensor, Tensor, PagedTokens, int], Tensor]
"""Computes ``paged_attention`` from queries, ``cu_seqlens``, tokens with
``token_lens``, and ``max_seqlen``: only to pages, without limits. Rows of a request
without tokens are undefined."""
_flash: PagedFlash | None = None


def use_paged_flash(attend: PagedFlash | None) -> None:
    """Let ``attend`` compute in this process those calls of ``paged_attention`` that it
    can compute. There is none by default.
    """
    global _flash
    _flash = attend


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    tokens: PagedTokens | None,
    *,
    attend_fresh: bool,
    max_seqlen: int,
    limits: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attend from each request's rows to its tokens in pages; the result is like ``q``.

    Args:
        q: ``[num_rows, num_heads, head_dim]``.
        k, v: the rows' own keys and values, ``[num_rows, num_kv_heads, head_dim]``.
        cu_seqlens: first row of each request and, last, where rows end; int32
            ``[num_requests + 1]``. The results of rows behind these are undefined.
        tokens: tokens that requests have in pages; None: none.
        attend_fresh: attend to the request's own rows as well; otherwise only to its
            pages.
        max_seqlen: an upper bound of the rows per request. A captured launch stays
            correct for all tables within it.
        limits: number of its request's keys that each row sees, int32 ``[num_rows]``,
            counted over the tokens in pages, then with ``attend_fresh`` the request's
            rows. A limit may exceed the number of keys. None: no limits.
        lse: where to write the logarithm of each softmax's denominator; contiguous
            float32 ``[num_rows, num_heads]``.
    """
    tokens = _nothing(k, cu_seqlens.shape[0] - 1) if tokens is None else tokens
    beyond_flash = (
        attend_fresh
        or limits is not None
        or lse is not None
        or tokens.token_lens is None
    )
    if _flash is None or beyond_flash:
        return _paged_attention(
            q, k, v, cu_seqlens, tokens, limits, lse, attend_fresh, max_seqlen
        )
    return _flash(q, cu_seqlens, tokens, max_seqlen)


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """``bidirectional_attention``, and each softmax's denominator as a logarithm,
    float32 ``[num_rows, num_heads]``.
    """
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    longest = max(stop - start for start, stop in itertools.pairwise(bounds))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=q.device)
    return paged_attention(
        q, k, v, cu_seqlens, None, attend_fresh=True, max_seqlen=longest, lse=lse
    ), lse


def _nothing(k: Tensor, num_requests: int) -> PagedTokens:
    """Make a ``PagedTokens`` without tokens."""
    no_page = k.new_empty(1, *k.shape[1:])
    per_head = torch.zeros(num_requests, k.shape[1], dtype=torch.int32, device=k.device)
    return PagedTokens(
        no_page,
        no_page,
        per_head,
        per_head,
        per_head.flatten()[:num_requests],
        per_head,
        0,
    )


@Operator
def _paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    tokens: PagedTokens,
    limits: Tensor | None,
    lse: Tensor | None,
    attend_fresh: bool,
    max_seqlen: int,
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for request, (first, last) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        if first == last:
            continue
        keys, values, numbers = _retained(request, tokens)
        if attend_fresh:
            # Rows of the request are numbered behind its tokens in pages.
            fresh_numbers = tokens.head_len[request, :, None] + torch.arange(
                last - first
            )
            keys, values = (
                torch.cat((x, y[first:last].transpose(0, 1)), 1)
                for x, y in ((keys, k), (values, v))
            )
            numbers = torch.cat((numbers, fresh_numbers), 1)
        sees_all = limits is None and tokens.token_lens is not None
        if sees_all and lse is None and keys.shape[1]:
            out[first:last] = _attend_to_all(q[first:last], keys, values)
            continue
        bounds_of_rows = (
            torch.full((last - first,), _NO_KEY)
            if limits is None
            else limits[first:last]
        )
        visible = numbers[:, None, None] < bounds_of_rows[:, None]
        # Query heads that share a KV head are further rows of it.
        by_kv_head = q[first:last].unflatten(1, (k.shape[1], -1))
        queries = by_kv_head.permute(1, 2, 0, 3).float()
        scale = q.shape[2] ** -0.5
        scores = queries @ keys[:, None].float().transpose(2, 3) * scale
        scores.masked_fill_(~visible, -torch.inf)
        denominators = scores.logsumexp(dim=-1, keepdim=True)
        weights = (
            scores - denominators.clamp(min=torch.finfo(torch.float32).min)
        ).exp_()
        out[first:last] = (
            (weights @ values[:, None].float()).permute(2, 0, 1, 3).flatten(1, 2)
        )
        if lse is not None:
            lse[first:last] = denominators[..., 0].permute(2, 0, 1).flatten(1)
    return out


def _attend_to_all(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of rows to keys and values ``[num_kv_heads, num_keys, head_dim]``."""
    queries, keys, values = q.transpose(0, 1)[None], keys[None], values[None]
    attended = F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
    return attended[0].transpose(0, 1)


_NO_KEY = torch.iinfo(torch.int32).max


def _retained(request: int, tokens: PagedTokens) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of a request's tokens in pages, ``[num_kv_heads, longest head,
    head_dim]``, and the number of each token in the request, ``[num_kv_heads, longest
    head]``. Behind the last token of a shorter head, values are zeros, and numbers are
    those of no key."""
    if tokens.token_lens is not None:
        return _retained_by_token(request, tokens)
    slots_per_page = tokens.k_pages.shape[1]
    lengths = tokens.head_len[request, :, None]
    numbers = torch.arange(int(lengths.max())).expand(len(lengths), -1)
    exists = numbers < lengths
    slots = torch.where(
        exists,
        tokens.head_start[request, :, None] + numbers * tokens.token_stride[request],
        0,
    )
    pages = torch.where(exists, tokens.page_tables[request, slots // slots_per_page], 0)
    # Slots without a token may hold NaN.
    keys, values = (
        x[pages, slots % slots_per_page].masked_fill_(~exists[..., None], 0)
        for x in tokens[:2]
    )
    return keys, values, numbers.masked_fill(~exists, _NO_KEY)


def _retained_by_token(
    request: int, tokens: PagedTokens
) -> tuple[Tensor, Tensor, Tensor]:
    """``_retained`` for the token-major layout, page by page."""
    num_heads = tokens.head_len.shape[1]
    slots_per_page = tokens.k_pages.shape[1]
    start, num_tokens = (
        int(of_heads[request, 0]) for of_heads in (tokens.head_start, tokens.head_len)
    )
    stop = start + num_tokens * num_heads
    first_page = start // slots_per_page
    pages = tokens.page_tables[request, first_page : -(-stop // slots_per_page)]
    slots = slice(
        start - first_page * slots_per_page, stop - first_page * slots_per_page
    )
    keys, values = (
        x[pages].flatten(0, 1)[slots].unflatten(0, (num_tokens, num_heads))
        for x in tokens[:2]
    )
    numbers = torch.arange(num_tokens).expand(num_heads, -1)
    return keys.transpose(0, 1), values.transpose(0, 1), numbers
