"""Random pages and requests for ``paged_attention``."""

import itertools
from typing import Any, NamedTuple

import torch

from dllm_engine.kernels.paged_tokens import PagedTokens


class PagedCase(NamedTuple):
    """Arguments of ``paged_attention``; every slot without a token holds NaN, unused page ids are no pages."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    tokens: PagedTokens

    def limits(self) -> torch.Tensor:
        """A limit for each row, from none of its request's keys up to all of them."""
        sizes, generator = self.cu_seqlens.cpu().diff(), torch.Generator().manual_seed(self.q.shape[0])
        most = (self.tokens.head_len.cpu().amax(1) + sizes).repeat_interleave(sizes)
        return (torch.rand(most.shape, generator=generator) * (most + 1)).int().to(self.q.device)

    def arguments(
        self, attend_fresh: bool, limited: bool, return_lse: bool, max_seqlen: int | None = None
    ) -> tuple[Any, ...]:
        """Of the operator, and so of the kernels of a device."""
        *paged, max_head_len = self.tokens
        limits = self.limits() if limited else None
        out = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        lse = out.new_empty(out.shape[:2], dtype=torch.float32) if return_lse else None
        return out, lse, *self[:4], limits, paged, max_head_len, attend_fresh, max_seqlen


def paged_case(
    rows: list[int],
    retained: list[list[int]],
    heads: int,
    dim: int,
    page_size: int = 4,
    packed: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device | str = "cpu",
    held: torch.dtype | None = None,
) -> PagedCase:
    """Requests of ``rows[r]`` rows and ``retained[r][h]`` tokens of KV head h, in pages shuffled over one pool.

    ``packed``: a range of slots for each head, one after the other; otherwise token-major, where heads of different
    lengths leave gaps. ``held``: a wider type that holds the numbers of ``dtype``; None: ``dtype`` itself.
    """
    generator = torch.Generator().manual_seed(seed)
    num_kv_heads = len(retained[0])
    slots_per_page = page_size * num_kv_heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    head_len = torch.tensor(retained, dtype=torch.int32)
    if packed:
        head_start = (head_len.cumsum(1) - head_len).int()
        token_stride = torch.ones(len(rows), dtype=torch.int32)
    else:
        head_start = torch.arange(num_kv_heads, dtype=torch.int32).repeat(len(rows), 1)
        token_stride = torch.full((len(rows),), num_kv_heads, dtype=torch.int32)
    ends = torch.where(head_len > 0, head_start + (head_len - 1) * token_stride[:, None] + 1, 0).amax(1)
    num_pages = -(-ends // slots_per_page)
    max_pages = int(num_pages.max()) + 1
    pool = torch.full((int(num_pages.sum()) + 3, 2, slots_per_page, dim), torch.nan, dtype=dtype)
    k_pages, v_pages = pool.unbind(1)
    page_tables = torch.full((len(rows), max_pages), 2**30, dtype=torch.int32)
    free = torch.randperm(len(pool), generator=generator).int()
    for request, count in enumerate(num_pages.tolist()):
        page_tables[request, :count], free = free[:count], free[count:]
        for head, length in enumerate(retained[request]):
            virtual = head_start[request, head] + torch.arange(length) * token_stride[request]
            page, offset = page_tables[request, virtual // slots_per_page].long(), virtual % slots_per_page
            k_pages[page, offset], v_pages[page, offset] = draw(length, dim), draw(length, dim)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    q, k, v = draw(sum(rows), heads, dim), draw(sum(rows), num_kv_heads, dim), draw(sum(rows), num_kv_heads, dim)
    q, k, v, pool = (x.to(device, held or dtype) for x in (q, k, v, pool))
    page_tables, head_start, token_stride, head_len = (
        x.to(device) for x in (page_tables, head_start, token_stride, head_len)
    )
    tokens = PagedTokens(pool[:, 0], pool[:, 1], page_tables, head_start, token_stride, head_len)
    return PagedCase(q, k, v, cu_seqlens.to(device), tokens)
