r"""Attention over pages of retained tokens, together with fresh rows or after writing them into the pages.

Request r has rows R_r in the flat batch and, per KV head h, ``head_len[r, h]`` retained tokens. Token t of head h lies
in virtual slot  head_start[r, h] + t · token_stride[r];  virtual slot σ lies in physical page
``page_tables[r, σ // slots_per_page]`` at offset ``σ % slots_per_page``. One formula for both layouts:

    token-major:   head_start[r, h] = h, token_stride = num_kv_heads; grows by appending pages
    packed ranges: token_stride = 1, head_start = prefix sums of the heads' budgets

With K_h, V_h the retained tokens of head h, and joined to them with ``attend_fresh`` the request's own fresh rows:

    out_i = Σ_j exp(s_ij − lse_i) v_j,   s_ij = q_i · k_j / √d,   lse_i = log Σ_j exp(s_ij),   i ∈ R_r

Query heads share KV heads in consecutive groups. A row with nothing to attend to has out = 0 and lse = −∞. Slots that
hold no retained token are never used in arithmetic: they may hold NaN.
"""

import itertools
from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.nn.functional as F


@overload
def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
    k_slots: torch.Tensor | None = None,
    v_slots: torch.Tensor | None = None,
    *,
    attend_fresh: bool,
    causal: bool = False,
    return_lse: Literal[False] = False,
    max_seqlen: int | None = None,
    max_head_len: int | None = None,
) -> torch.Tensor: ...


@overload
def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
    k_slots: torch.Tensor | None = None,
    v_slots: torch.Tensor | None = None,
    *,
    attend_fresh: bool,
    causal: bool = False,
    return_lse: Literal[True],
    max_seqlen: int | None = None,
    max_head_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
    k_slots: torch.Tensor | None = None,
    v_slots: torch.Tensor | None = None,
    *,
    attend_fresh: bool,
    causal: bool = False,
    return_lse: bool = False,
    max_seqlen: int | None = None,
    max_head_len: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from each request's rows to its retained tokens.

    On CPU, requests in token-major layout that have equally many rows and retained tokens share one library call.

    Args:
        q: ``[num_rows, num_heads, head_dim]``.
        k, v: the rows' own keys and values, ``[num_rows, num_kv_heads, head_dim]``.
        cu_seqlens: first row of each request and, last, ``num_rows``; int32 ``[num_requests + 1]``.
        k_pages, v_pages: ``[num_pages, slots_per_page, head_dim]``; a page is contiguous, pages need not follow each
            other closely (both may be views of one allocation).
        page_tables: int32 ``[num_requests, max_pages]``; entries beyond a request's pages are never read.
        head_start, head_len: int32 ``[num_requests, num_kv_heads]``.
        token_stride: int32 ``[num_requests]``.
        k_slots, v_slots: with ``attend_fresh=False``, the physical slot ``page · slots_per_page + offset`` each row
            and KV head is written to before anything is read; int64 ``[num_rows, num_kv_heads]``, −1 writes nothing,
            None writes nothing at all. No slot may be named twice.
        attend_fresh: attend to retained tokens and the request's own fresh rows; otherwise to its pages alone.
        causal: fresh row i sees all retained tokens and fresh rows ≤ i. With ``attend_fresh=False`` the n rows are
            taken to be the last n of the retained tokens: row i sees tokens t ≤ head_len − n + i.
        return_lse: also return the natural logarithm of each softmax's denominator.
        max_seqlen, max_head_len: upper bounds of rows per request and of ``head_len``. A CUDA device needs them on
            the host to launch; left out, they are copied from the device, which waits for it.

    Returns:
        ``[num_rows, num_heads, head_dim]``; with ``return_lse`` also float32 ``[num_rows, num_heads]``.

    Raises:
        ValueError: shapes or lengths that do not belong together; slots to write with ``attend_fresh=True``.
    """
    cu_seqlens = _as_tensor(cu_seqlens, q.device)
    _check(q, k, v, cu_seqlens, k_pages, v_pages, page_tables, head_start, token_stride, head_len)
    if attend_fresh and (k_slots is not None or v_slots is not None):
        raise ValueError("attend_fresh=True reads fresh K/V directly; k_slots and v_slots belong to attend_fresh=False")
    if k_slots is not None:
        write_slots(k, k_pages, k_slots)
    if v_slots is not None:
        write_slots(v, v_pages, v_slots)
    out, lse = _attend(
        q, k, v, cu_seqlens, k_pages, v_pages, page_tables, head_start, token_stride, head_len,
        attend_fresh, causal, return_lse, max_seqlen, max_head_len,
    )  # fmt: skip
    return (out, lse) if return_lse else out


@torch.library.custom_op("dllm::write_slots", mutates_args=("pages",), device_types="cpu")
def write_slots(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Write ``values[i, h]`` to physical slot ``slots[i, h]``.

    Args:
        values: ``[num_rows, num_kv_heads, head_dim]``.
        pages: ``[num_pages, slots_per_page, head_dim]``.
        slots: int64 ``[num_rows, num_kv_heads]``; −1 writes nothing.
    """
    _check_slots(values, pages, slots)
    kept = slots >= 0
    if not kept.all():
        values, slots = values[kept], slots[kept]
    slots_per_page = pages.shape[1]
    pages[slots // slots_per_page, slots % slots_per_page] = values.to(pages.dtype)


@write_slots.register_fake
def _(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    _check_slots(values, pages, slots)


@torch.library.custom_op("dllm::paged_attention", mutates_args=(), device_types="cpu")
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
    attend_fresh: bool,
    causal: bool,
    return_lse: bool,
    max_seqlen: int | None,
    max_head_len: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``paged_attention`` after the writes: (out, lse), with lse empty where it is not asked for."""
    bounds = cu_seqlens.tolist()
    _check_lengths(bounds, q.shape[0], k_pages, page_tables, head_start, token_stride, head_len)
    out, lse = _empty_results(q, return_lse)
    for (length, retained), members in _equal_groups(bounds, k_pages, head_start, token_stride, head_len).items():
        rows = _rows(bounds, members, length)
        num_fresh = length if attend_fresh else 0
        fresh_k, fresh_v = (x[rows].unflatten(0, (len(members), length))[:, :num_fresh] for x in (k, v))
        if retained is None:
            of_members = torch.tensor(members)
            last = head_len[of_members]
            slots, visible = _slots(
                page_tables[of_members], head_start[of_members], token_stride[of_members], last, k_pages.shape[1]
            )
            keys = _gather_slots(fresh_k, k_pages, slots, visible)
            values = _gather_slots(fresh_v, v_pages, slots, visible)
            visible = F.pad(visible.transpose(1, 2), (num_fresh, 0), value=True)[:, :, None]
        else:
            last = torch.full((1, 1), retained)
            keys = _gather_whole_pages(fresh_k, k_pages, page_tables, members, retained)
            values = _gather_whole_pages(fresh_v, v_pages, page_tables, members, retained)
            visible = None
        if causal:
            seen = _causal(length, keys.shape[1], last, attend_fresh)
            visible = seen if visible is None else visible & seen
        group_q = q[rows].unflatten(0, (len(members), length))
        group_out, group_lse = _softmax_attention(group_q, keys, values, visible, return_lse)
        out[rows] = group_out.flatten(0, 1)
        if return_lse:
            lse[rows] = group_lse.flatten(0, 1)
    return out, lse


@_attend.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
    attend_fresh: bool,
    causal: bool,
    return_lse: bool,
    max_seqlen: int | None,
    max_head_len: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_results(q, return_lse)


def paged_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
    k_slots: torch.Tensor | None = None,
    v_slots: torch.Tensor | None = None,
    *,
    attend_fresh: bool,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula, in float64, a request and a head at a time: (out, lse). The pages are left as they are."""
    k_pages, v_pages = (_written(x, pages, slots) for x, pages, slots in ((k, k_pages, k_slots), (v, v_pages, v_slots)))
    slots_per_page = k_pages.shape[1]
    group = q.shape[1] // k.shape[1]
    out = q.new_zeros(q.shape, dtype=torch.float64)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for request, (start, stop) in enumerate(itertools.pairwise(torch.as_tensor(cu_seqlens).tolist())):
        for head in range(q.shape[1]):
            kv_head = head // group
            tokens = torch.arange(int(head_len[request, kv_head]), device=q.device)
            slots = head_start[request, kv_head] + tokens * token_stride[request]
            where = page_tables[request, slots // slots_per_page].long(), slots % slots_per_page
            keys, values = k_pages[where].double(), v_pages[where].double()
            i = torch.arange(stop - start, device=q.device)[:, None]
            visible = (
                tokens <= len(tokens) - (stop - start) + i if causal and not attend_fresh else tokens <= tokens + i
            )
            if attend_fresh:
                keys = torch.cat((keys, k[start:stop, kv_head].double()))
                values = torch.cat((values, v[start:stop, kv_head].double()))
                visible = torch.cat((visible, (i.T <= i) | (not causal)), dim=1)
            scores = (q[start:stop, head].double() @ keys.T) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(~visible, -torch.inf)
            lse[start:stop, head] = scores.logsumexp(dim=-1)
            weights = (scores - lse[start:stop, head, None]).exp().nan_to_num(0.0)
            out[start:stop, head] = weights @ values
    return out, lse


def _written(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    """A copy of ``pages`` with ``values`` written to ``slots``, one at a time."""
    pages = pages.clone()
    if slots is not None:
        for row, head in (slots >= 0).nonzero().tolist():
            page, offset = divmod(int(slots[row, head]), pages.shape[1])
            pages[page, offset] = values[row, head]
    return pages


def _equal_groups(
    bounds: list[int],
    k_pages: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
) -> dict[tuple[int, int | None], list[int]]:
    """Requests by (rows, retained tokens); None for those whose retained tokens do not fill whole pages in order."""
    num_kv_heads = head_len.shape[1]
    token_major_start = list(range(num_kv_heads))
    whole_tokens = k_pages.shape[1] % num_kv_heads == 0
    groups: dict[tuple[int, int | None], list[int]] = {}
    starts, strides, lengths = head_start.tolist(), token_stride.tolist(), head_len.tolist()
    for request, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start == stop:
            continue
        retained: int | None = lengths[request][0]
        token_major = whole_tokens and strides[request] == num_kv_heads and starts[request] == token_major_start
        if lengths[request] != [retained] * num_kv_heads or (retained and not token_major):
            retained = None
        groups.setdefault((stop - start, retained), []).append(request)
    return groups


def _rows(bounds: list[int], members: list[int], length: int) -> slice | torch.Tensor:
    """The rows of requests of equal length; a slice where they follow each other."""
    starts = [bounds[request] for request in members]
    if starts == list(range(starts[0], starts[0] + len(starts) * length, length)):
        return slice(starts[0], starts[0] + len(starts) * length)
    return (torch.tensor(starts)[:, None] + torch.arange(length)).flatten()


def _gather_whole_pages(
    fresh: torch.Tensor, pages: torch.Tensor, page_tables: torch.Tensor, members: list[int], retained: int
) -> torch.Tensor:
    """``fresh`` ``[group, fresh rows, num_kv_heads, head_dim]`` and after it the first ``retained`` tokens of the pages.

    Whole pages are copied behind the fresh rows, where what the last page holds beyond the retained tokens falls off
    the end: one copy, and no mask.
    """
    if not retained:
        return fresh
    group, num_fresh, num_kv_heads, head_dim = fresh.shape
    num_pages = -(-retained * num_kv_heads // pages.shape[1])
    page_size = pages.shape[1] // num_kv_heads
    joined = fresh.new_empty(group, num_fresh + num_pages * page_size, num_kv_heads, head_dim)
    joined[:, :num_fresh] = fresh
    for target, request in zip(joined[:, num_fresh:], members, strict=True):
        torch.index_select(
            pages, 0, page_tables[request, :num_pages], out=target.view(num_pages, *pages.shape[1:])
        )  # fmt: skip
    return joined[:, : num_fresh + retained]


def _slots(
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
    slots_per_page: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical slots of retained tokens and which of them exist, ``[group, longest, num_kv_heads]`` each."""
    tokens = torch.arange(int(head_len.max()))[None, :, None]
    exists = tokens < head_len[:, None]
    virtual = torch.where(exists, head_start[:, None] + tokens * token_stride[:, None, None], 0)
    pages = page_tables.gather(1, (virtual // slots_per_page).flatten(1)).view_as(virtual)
    return torch.where(exists, pages * slots_per_page + virtual % slots_per_page, 0), exists


def _gather_slots(fresh: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """``fresh`` and after it the tokens in ``slots``, with zeros where there is none."""
    retained = pages[slots // pages.shape[1], slots % pages.shape[1]]
    return torch.cat((fresh, retained.masked_fill_(~exists[..., None], 0)), dim=1)


def _causal(length: int, num_keys: int, head_len: torch.Tensor, attend_fresh: bool) -> torch.Tensor:
    """Which keys (fresh ones first) a row sees: ``[group or 1, num_kv_heads or 1, length, num_keys]``."""
    row, key = torch.arange(length)[:, None], torch.arange(num_keys)
    if attend_fresh:
        return ((key <= row) | (key >= length))[None, None]
    return key <= head_len[:, :, None, None] - length + row


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
    sharing = q.shape[2] // k.shape[2]
    # Query heads that share a KV head become further rows of it, so that K and V are not expanded.
    queries = q.unflatten(2, (-1, sharing)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    if visible is not None and visible.shape[2] > 1:
        visible = visible.repeat(1, 1, sharing, 1)

    def per_query_head(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (sharing, -1)).flatten(1, 2).transpose(1, 2)

    if return_lse:
        scores = queries.float() @ keys.float().transpose(2, 3) * q.shape[-1] ** -0.5
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        lse = scores.logsumexp(dim=-1, keepdim=True)
        weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)).exp()
        return per_query_head((weights @ values.float()).to(q.dtype)), per_query_head(lse)[..., 0]
    if not k.shape[1]:
        return torch.zeros_like(q), None
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)
    if visible is not None:
        out = out.masked_fill(~visible.any(dim=-1, keepdim=True), 0)
    return per_query_head(out), None


def _empty_results(q: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


def _as_tensor(cu_seqlens: torch.Tensor | Sequence[int], device: torch.device) -> torch.Tensor:
    if isinstance(cu_seqlens, torch.Tensor):
        return cu_seqlens
    return torch.tensor(cu_seqlens, dtype=torch.int32, device=device)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not belong together")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads")
    if k_pages.dim() != 3 or k_pages.shape != v_pages.shape or k_pages.shape[2] != q.shape[2]:
        raise ValueError(
            f"k_pages {list(k_pages.shape)}, v_pages {list(v_pages.shape)} do not belong together and to q {list(q.shape)}"
        )
    if len({x.dtype for x in (q, k, v, k_pages, v_pages)}) > 1:
        raise ValueError(f"q, k, v and the pages differ in type: {[x.dtype for x in (q, k, v, k_pages, v_pages)]}")
    num_requests = cu_seqlens.numel() - 1
    per_head = (num_requests, k.shape[1])
    if (
        page_tables.dim() != 2
        or page_tables.shape[0] != num_requests
        or head_start.shape != per_head
        or head_len.shape != per_head
        or token_stride.shape != (num_requests,)
    ):
        raise ValueError(
            f"for {num_requests} requests and {k.shape[1]} KV heads, page_tables {list(page_tables.shape)}, "
            f"head_start {list(head_start.shape)}, token_stride {list(token_stride.shape)} and "
            f"head_len {list(head_len.shape)} do not fit"
        )


def _check_slots(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    if values.dim() != 3 or pages.dim() != 3 or values.shape[2] != pages.shape[2] or slots.shape != values.shape[:2]:
        raise ValueError(
            f"values {list(values.shape)}, pages {list(pages.shape)}, slots {list(slots.shape)} do not belong together"
        )


def _check_lengths(
    bounds: list[int],
    num_rows: int,
    k_pages: torch.Tensor,
    page_tables: torch.Tensor,
    head_start: torch.Tensor,
    token_stride: torch.Tensor,
    head_len: torch.Tensor,
) -> None:
    """What only a host can check without waiting for its device."""
    if bounds[0] != 0 or bounds[-1] != num_rows or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens={bounds} does not divide {num_rows} rows")
    last_slot = torch.where(head_len > 0, head_start + (head_len - 1) * token_stride[:, None], -1)
    capacity = page_tables.shape[1] * k_pages.shape[1]
    if last_slot.numel() and int(last_slot.max()) >= capacity:
        raise ValueError(f"head_len reaches slot {int(last_slot.max())} of page tables of {capacity} slots")
