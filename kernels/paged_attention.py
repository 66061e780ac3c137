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
    """
    if not isinstance(cu_seqlens, torch.Tensor):
        if max_seqlen is None:
            max_seqlen = max((stop - start for start, stop in itertools.pairwise(cu_seqlens)), default=0)
        cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32, device=q.device)
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
    for request, (first, last) in enumerate(itertools.pairwise(bounds)):
        if first == last:
            continue
        keys, values, numbers = _retained(request, *paged)
        if attend_fresh:
            own = paged[-1][request, :, None] + torch.arange(last - first)  # behind the tokens in pages
            keys, values = (torch.cat((x, y[first:last].transpose(0, 1)), 1) for x, y in ((keys, k), (values, v)))
            numbers = torch.cat((numbers, own), 1)
        bounds_of_rows = torch.full((last - first,), _NO_KEY) if limits is None else limits[first:last]
        visible = numbers[:, None, None] < bounds_of_rows[:, None]
        # Query heads that share a KV head are further rows of it.
        queries = q[first:last].unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).float()
        scores = queries @ keys[:, None].float().transpose(2, 3) * q.shape[2] ** -0.5
        scores.masked_fill_(~visible, -torch.inf)
        denominators = scores.logsumexp(dim=-1, keepdim=True)
        weights = (scores - denominators.clamp(min=torch.finfo(torch.float32).min)).exp_()
        out[first:last] = (weights @ values[:, None].float()).permute(2, 0, 1, 3).flatten(1, 2)
        if lse is not None:
            lse[first:last] = denominators[..., 0].permute(2, 0, 1).flatten(1)


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
    pages = torch.where(exists, table[slots // slots_per_page], 0)
    # Slots without a token may hold NaN.
    keys, values = (x[pages, slots % slots_per_page].masked_fill_(~exists[..., None], 0) for x in (k_pages, v_pages))
    return keys, values, numbers.masked_fill(~exists, _NO_KEY)
