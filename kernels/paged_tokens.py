"""Keys and values of requests in pages."""

from typing import NamedTuple

import torch


class PagedTokens(NamedTuple):
    """Keys and values that requests have in pages, in one layer.

    Request r has ``head_len[r, h]`` tokens for KV head h. Token t of head h lies in virtual slot
    ``head_start[r, h] + t · token_stride[r]``, and virtual slot σ in page ``page_tables[r, σ // slots_per_page]`` at
    offset ``σ % slots_per_page``. There are two layouts:

        token-major:  head_start[r, h] = h,  token_stride[r] = num_kv_heads;  grows by appending pages
        packed:       head_start[r, h] = Σ_{g<h} head_len[r, g],  token_stride[r] = 1;  a range of slots per head

    Slots without a token are never used in arithmetic: they may hold NaN.
    """

    k_pages: torch.Tensor
    """``[num_pages, slots_per_page, head_dim]``. A page is contiguous; pages may lie apart by whole slots."""
    v_pages: torch.Tensor
    """As ``k_pages``."""
    page_tables: torch.Tensor
    """int32 ``[num_requests, max_pages]``; entries beyond a request's pages are not read."""
    head_start: torch.Tensor
    """int32 ``[num_requests, num_kv_heads]``"""
    token_stride: torch.Tensor
    """int32 ``[num_requests]``"""
    head_len: torch.Tensor
    """int32 ``[num_requests, num_kv_heads]``"""
    max_head_len: int | None = None
    """An upper bound of ``head_len`` that is known on the host. A CUDA launch needs it, and without it waits for the
    device to tell. It only decides how finely the work is split: a captured launch stays correct for longer heads."""
    token_lens: torch.Tensor | None = None
    """Tokens of each request, int32 ``[num_requests]``, contiguous, if the layout is token-major: then all its heads
    have so many. None: either layout."""
