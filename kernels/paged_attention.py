r"""Attention of a batch's rows to tokens in pages (``PagedTokens``), and to their own keys and values.

With K_h, V_h the keys and values that request r has in pages for KV head h and, with ``attend_fresh``, those of its own
rows R_r as well:

    out_i = Σ_j exp(s_ij − lse_i) v_j,   s_ij = q_i · k_j / √d,   lse_i = log Σ_j exp(s_ij),   i ∈ R_r

Query heads share KV heads in consecutive groups. A row with nothing to attend to has out = 0 and lse = −∞.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dllm_engine.kernels._operator import operator
from dllm_engine.kernels.paged_tokens import PagedTokens

_COPIED_BYTES = 1 << 20
"""Keys and values that a CPU thread copies out of pages before it attends to them: half of a core's cache."""


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    tokens: PagedTokens,
    *,
    attend_fresh: bool,
    causal: bool = False,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Attend from each request's rows to its tokens in pages.

    On a CPU, requests with token-major pages and equal numbers of rows and tokens share a call of PyTorch's attention.

    Args:
        q: ``[num_rows, num_heads, head_dim]``.
        k, v: the rows' own keys and values, ``[num_rows, num_kv_heads, head_dim]``.
        cu_seqlens: first row of each request and, last, where rows end; int32 ``[num_requests + 1]``. The results of
            rows behind these are undefined.
        attend_fresh: attend to the request's own rows as well; otherwise to its pages alone.
        causal: row i sees all tokens in pages and the request's rows up to itself. With ``attend_fresh=False`` the n
            rows are taken to be the last n tokens in pages: row i sees tokens t ≤ head_len − n + i.
        max_seqlen: an upper bound of the rows per request. A CUDA launch needs it, and without it waits for the device
            to tell. A captured launch stays correct for all tables within this bound.

    Returns:
        ``[num_rows, num_heads, head_dim]``.

    Raises:
        ValueError: shapes, types or lengths that do not fit together.
    """
    return paged_attention_with_lse(
        q, k, v, cu_seqlens, tokens, attend_fresh=attend_fresh, causal=causal, max_seqlen=max_seqlen, return_lse=False
    )[0]


def paged_attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    tokens: PagedTokens,
    *,
    attend_fresh: bool,
    causal: bool = False,
    max_seqlen: int | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``paged_attention``, and the logarithm of each softmax's denominator: float32 ``[num_rows, num_heads]``, empty
    unless ``return_lse``."""
    if not isinstance(cu_seqlens, torch.Tensor):
        if max_seqlen is None:
            max_seqlen = max((stop - start for start, stop in itertools.pairwise(cu_seqlens)), default=0)
        cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32, device=q.device)
    _check(q, k, v, cu_seqlens, tokens)
    *tensors, max_head_len = tokens
    return _paged_attention(q, k, v, cu_seqlens, tensors, max_head_len, attend_fresh, causal, return_lse, max_seqlen)


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bidirectional attention within each sequence, and the logarithm of each softmax's denominator.

    Arguments as of ``bidirectional_attention``; returns ``[num_rows, num_heads, head_dim]`` and float32
    ``[num_rows, num_heads]``.
    """
    no_page = k.new_empty(1, *k.shape[1:])
    per_head = torch.zeros(len(cu_seqlens) - 1, k.shape[1], dtype=torch.int32, device=q.device)
    per_request = per_head.flatten()[: len(per_head)]
    nothing = PagedTokens(no_page, no_page, per_head, per_head, per_request, per_head, max_head_len=0)
    return paged_attention_with_lse(q, k, v, cu_seqlens, nothing, attend_fresh=True)


@operator("paged_attention", triton="paged_attention")
def _paged_attention(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, which is empty unless asked for. ``paged``: the tensors of ``PagedTokens``."""
    k_pages, v_pages, page_tables, head_start, token_stride, head_len = paged
    tokens = PagedTokens(k_pages, v_pages, page_tables, head_start, token_stride, head_len, max_head_len)
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] > q.shape[0] or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens={bounds} does not divide {q.shape[0]} rows")
    out, lse = empty_results(q, return_lse)
    for (length, retained), group in _equal_groups(bounds, tokens).items():
        num_fresh = length if attend_fresh else 0
        copies = None
        per_part = len(group)
        if retained:
            page_size = tokens.k_pages.shape[1] // k.shape[1]
            copied = num_fresh + -(-retained // page_size) * page_size
            per_part = _requests_per_part(copied, k)
            copies = k.new_empty(2, min(per_part, len(group)), copied, *k.shape[1:])
        for start in range(0, len(group), per_part):
            members = group[start : start + per_part]
            rows = _rows(bounds, members, length, q.device)
            fresh_k = k[rows].view(len(members), length, *k.shape[1:])[:, :num_fresh]
            fresh_v = v[rows].view(len(members), length, *v.shape[1:])[:, :num_fresh]
            if retained is None:
                keys, values, visible = _gather_ragged(fresh_k, fresh_v, tokens, members)
            else:
                keys, values, visible = fresh_k, fresh_v, None
                if copies is not None:
                    tables = tokens.page_tables
                    keys = _gather_whole_pages(fresh_k, tokens.k_pages, tables, members, retained, copies[0])
                    values = _gather_whole_pages(fresh_v, tokens.v_pages, tables, members, retained, copies[1])
            if causal:
                seen = _causal(length, keys.shape[1], tokens.head_len[members], attend_fresh)
                visible = seen if visible is None else visible & seen
            part_q = q[rows].view(len(members), length, *q.shape[1:])
            part_out, part_lse = _softmax_attention(part_q, keys, values, visible, return_lse)
            if len(part_q) * length == len(q) and part_lse is None:
                return part_out.flatten(0, 1).contiguous(), lse
            out[rows] = part_out.flatten(0, 1)
            if part_lse is not None:
                lse[rows] = part_lse.flatten(0, 1)
    return out, lse


@_paged_attention.register_fake
def _(q: torch.Tensor, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_results(q, bool(arguments[-2]))


def empty_results(q: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the operator's results."""
    lse = q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, tokens: PagedTokens) -> None:
    # Every layer of every step comes here, so each shape is asked for once.
    k_pages, v_pages, page_tables, head_start, token_stride, head_len, _ = tokens
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
    for numbers in (cu_seqlens, page_tables, head_start, token_stride, head_len):
        if numbers.dtype != torch.int32 or not numbers.is_contiguous():
            raise ValueError(
                f"cu_seqlens, page_tables, head_start, token_stride and head_len must be contiguous int32; one is "
                f"{numbers.dtype} {list(numbers.shape)} with strides {numbers.stride()}"
            )


# The CPU path


def _equal_groups(bounds: list[int], tokens: PagedTokens) -> dict[tuple[int, int | None], list[int]]:
    """Requests by (rows, tokens in pages); None for those whose tokens do not fill whole pages in order."""
    num_kv_heads, slots_per_page = tokens.head_len.shape[1], tokens.k_pages.shape[1]
    capacity = tokens.page_tables.shape[1] * slots_per_page
    whole_tokens = slots_per_page % num_kv_heads == 0
    token_major = list(range(num_kv_heads))
    groups: dict[tuple[int, int | None], list[int]] = {}
    layout = zip(tokens.head_start.tolist(), tokens.token_stride.tolist(), tokens.head_len.tolist(), strict=True)
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


def _rows(bounds: list[int], members: list[int], length: int, device: torch.device) -> slice | torch.Tensor:
    """The rows of requests of equal length; a slice where they follow each other."""
    starts = [bounds[request] for request in members]
    if starts == list(range(starts[0], starts[0] + len(starts) * length, length)):
        return slice(starts[0], starts[0] + len(starts) * length)
    return (torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)).flatten()


def _requests_per_part(num_tokens: int, k: torch.Tensor) -> int:
    """How many requests of ``num_tokens`` keys and values each to attend to at once.

    Few enough for the copies of their keys and values to stay in the cores' caches until attention has read them, and
    enough for every thread to have a head to work on. A GPU counts as 64 threads.
    """
    num_threads, (_, num_kv_heads, head_dim) = 64 if k.is_cuda else torch.get_num_threads(), k.shape
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
    """``fresh`` ``[group, fresh rows, num_kv_heads, head_dim]`` followed by the first ``retained`` tokens in pages.

    Whole pages are copied behind the fresh rows and the rest of the last page is cut off: one copy, and no mask.
    ``copies``: memory for it, ``[group or more, fresh rows and tokens of whole pages, num_kv_heads, head_dim]``.
    """
    joined, num_fresh = copies[: len(members)], fresh.shape[1]
    joined[:, :num_fresh] = fresh
    num_pages = -(-retained * fresh.shape[2] // pages.shape[1])
    for target, request in zip(joined[:, num_fresh:].unbind(), members, strict=True):
        torch.index_select(pages, 0, page_tables[request, :num_pages], out=target.view(-1, *pages.shape[1:]))
    return joined[:, : num_fresh + retained]


def _gather_ragged(
    fresh_k: torch.Tensor, fresh_v: torch.Tensor, tokens: PagedTokens, members: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of requests whose heads have tokens of their own, fresh ones first, and which of them exist.

    ``[group, fresh rows and longest head, num_kv_heads, head_dim]`` twice, with zeros where there is none, and bool
    ``[group, num_kv_heads, 1, fresh rows and longest head]``.
    """
    slots_per_page, head_len = tokens.k_pages.shape[1], tokens.head_len[members]
    numbers = torch.arange(int(head_len.max()), device=head_len.device)[None, :, None]
    exists = numbers < head_len[:, None]
    virtual = tokens.head_start[members, None] + numbers * tokens.token_stride[members, None, None]
    virtual = torch.where(exists, virtual, 0)
    pages = tokens.page_tables[members].gather(1, (virtual // slots_per_page).flatten(1)).view_as(virtual).long()
    # For tokens that do not exist, any page that does.
    where = torch.where(exists, pages, 0), virtual % slots_per_page
    absent = ~exists[..., None]
    keys = torch.cat((fresh_k, tokens.k_pages[where].masked_fill_(absent, 0)), dim=1)
    values = torch.cat((fresh_v, tokens.v_pages[where].masked_fill_(absent, 0)), dim=1)
    visible = F.pad(exists.transpose(1, 2), (fresh_k.shape[1], 0), value=True)[:, :, None]
    return keys, values, visible


def _causal(length: int, num_keys: int, head_len: torch.Tensor, attend_fresh: bool) -> torch.Tensor:
    """Which keys (fresh ones first) a row sees: ``[group or 1, num_kv_heads or 1, length, num_keys]``.

    ``head_len``: of the group, ``[group, num_kv_heads]``.
    """
    row, key = (torch.arange(count, device=head_len.device) for count in (length, num_keys))
    if attend_fresh:
        return ((key <= row[:, None]) | (key >= length))[None, None]
    return key <= head_len[:, :, None, None] - length + row[:, None]


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

    if return_lse and visible is None and k.shape[1] and not q.is_cuda:
        # What scaled_dot_product_attention calls on a CPU; only by this name does it tell the denominators. Scores of
        # all rows and keys are never held at once.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values)
        return per_query_head(out), per_query_head(lse[..., None].float())[..., 0]
    if return_lse:
        out, lse = queries.new_empty(queries.shape), queries.new_empty(*queries.shape[:3], 1, dtype=torch.float32)
        for head in range(num_kv_heads):  # scores of all heads would take gigabytes
            scores = queries[:, head].float() @ keys[:, head].float().transpose(1, 2) * head_dim**-0.5
            if visible is not None:
                scores.masked_fill_(~visible[:, head % visible.shape[1]], -torch.inf)
            lse[:, head] = of_head = scores.logsumexp(dim=-1, keepdim=True)
            weights = (scores - of_head.clamp(min=torch.finfo(of_head.dtype).min)).exp_()
            out[:, head] = weights @ values[:, head].float()
        return per_query_head(out), per_query_head(lse)[..., 0]
    if not k.shape[1]:
        return torch.zeros_like(q), None
    # Gives zeros where nothing is visible.
    return per_query_head(F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)), None
