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
    num_kv_heads = k.shape[1]
    _check_lengths(bounds, q.shape[0], k_pages, page_tables, head_start, token_stride, head_len)
    out, lse = _empty_results(q, return_lse)
    for (length, retained), members in _equal_groups(bounds, k_pages, head_start, token_stride, head_len).items():
        rows = _rows(bounds, members, length)
        requests = torch.tensor(members)
        fresh = _grouped(k, rows, length), _grouped(v, rows, length)
        if not attend_fresh:
            fresh = fresh[0][:, :0], fresh[1][:, :0]
        if retained is None:
            keys, values, visible = _gather_ranges(
                fresh, k_pages, v_pages, page_tables[requests], head_start[requests], token_stride[requests],
                head_len[requests],
            )  # fmt: skip
            last = head_len[requests][:, :, None, None]
        else:
            keys, values = _gather_whole_pages(fresh, k_pages, v_pages, page_tables, members, retained)
            visible = None
            last = torch.full((1, 1, 1, 1), retained)
        if causal:
            ahead = _causal(length, keys.shape[1], fresh[0].shape[1], last)
            visible = ahead if visible is None else visible & ahead
        group_out, group_lse = _softmax_attention(_grouped(q, rows, length), keys, values, visible, return_lse)
        out[rows] = group_out.flatten(0, 1)
        if group_lse is not None:
            lse[rows] = group_lse.flatten(0, 1)
    return out, lse
