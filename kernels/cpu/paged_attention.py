"""How the CPU path of ``paged_attention`` gathers keys and values, and attends to them."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dllm_engine.kernels.paged_tokens import PagedTokens

_COPIED_BYTES = 4 << 20
"""Keys and values that a CPU thread copies out of pages before it attends to them: a core's part of the caches."""
SeenKeys = tuple[slice, int, torch.Tensor | None]
"""Rows of a part, the first so many keys, and which of these each row sees; None: all."""
_MASKED_ROWS = 128
"""Rows that attend at once where a mask says to which keys."""
_ROWS_PER_CALL = 32
"""Rows of equal limit that are worth a call of their own, without a mask. A request alone takes two calls in any case,
which cost less than making a mask."""


class Part(NamedTuple):
    """Requests of equal shape, which attend together."""

    members: list[int]
    rows: slice | list[int]
    """All of the members' rows; a slice where they follow each other."""
    length: int
    """Rows of each."""
    retained: int | None
    """Tokens in pages of each; None where heads differ, or the tokens do not fill whole pages in order."""
    limits: tuple[int, ...] | None
    """How many keys each row of a member sees; None: all."""

    def of_members(self, x: torch.Tensor) -> torch.Tensor:
        """The members' rows of ``x`` ``[num_rows, ...]``: ``[group, length, ...]``."""
        num_members = len(self.members)
        rows = x if num_members * self.length == x.shape[0] else x[self.rows]
        return rows.view(num_members, self.length, *x.shape[1:])


def parts_of(
    cu_seqlens: torch.Tensor, limits: torch.Tensor | None, num_rows: int, tokens: PagedTokens, attend_fresh: bool
) -> Iterator[Part]:
    """The requests that have rows. Few enough are in a part for the copies of their keys and values to stay in the
    cores' caches until attention has read them, and enough for every thread to have a head. A GPU counts as 16
    threads."""
    bounds, pages = cu_seqlens.tolist(), tokens.k_pages
    all_limits = None if limits is None else limits.tolist()
    if bounds[0] != 0 or bounds[-1] > num_rows or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens={bounds} does not divide {num_rows} rows")
    num_kv_heads, (_, slots_per_page, head_dim) = tokens.head_len.shape[1], pages.shape
    capacity = tokens.page_tables.shape[1] * slots_per_page
    whole_tokens, token_major = slots_per_page % num_kv_heads == 0, list(range(num_kv_heads))
    groups: dict[tuple[int, int | None, tuple[int, ...] | None], list[int]] = {}
    layout = zip(tokens.head_start.tolist(), tokens.token_stride.tolist(), tokens.head_len.tolist(), strict=True)
    for request, (starts, stride, lengths) in enumerate(layout):
        length, longest = bounds[request + 1] - bounds[request], max(lengths)
        if not length:
            continue
        in_order = not longest or (whole_tokens and stride == num_kv_heads and starts == token_major)
        in_order = in_order and lengths.count(longest) == num_kv_heads
        if in_order:
            end = longest * num_kv_heads
        else:
            end = max(start + (n - 1) * stride + 1 for start, n in zip(starts, lengths, strict=True) if n)
        if end > capacity:
            raise ValueError(f"request {request} retains tokens up to slot {end} of page tables of {capacity} slots")
        own_limits = None if all_limits is None else tuple(all_limits[bounds[request] : bounds[request + 1]])
        if own_limits is not None and in_order and min(own_limits) >= longest + length * attend_fresh:
            own_limits = None
        groups.setdefault((length, longest if in_order else None, own_limits), []).append(request)
    num_threads = 16 if pages.is_cuda else torch.get_num_threads()
    token_bytes = 2 * num_kv_heads * head_dim * pages.element_size()
    for (length, retained, own_limits), group in groups.items():
        num_members = len(group)
        if retained:
            copied = token_bytes * (retained + length * attend_fresh)
            num_members = max(1, num_threads * _COPIED_BYTES // copied, -(-num_threads // num_kv_heads))
        for start in range(0, len(group), num_members):
            members = group[start : start + num_members]
            starts = [bounds[request] for request in members]
            rows: slice | list[int] = slice(starts[0], starts[-1] + length)
            if starts[-1] - starts[0] > (len(members) - 1) * length:  # others lie between them
                rows = [row for first in starts for row in range(first, first + length)]
            yield Part(members, rows, length, retained, own_limits)


def gather_whole_pages(
    fresh_k: torch.Tensor, fresh_v: torch.Tensor, tokens: PagedTokens, members: list[int], retained: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of requests: the first ``retained`` tokens in pages, followed by the fresh ones ``[group,
    num_kv_heads, fresh rows, head_dim]``.

    Whole pages are copied. What the last one has beyond ``retained`` is written over or cut off: no mask is needed.
    """
    slots_per_page, page_size = tokens.k_pages.shape[1], tokens.k_pages[0].numel()
    group, num_kv_heads, num_fresh, head_dim = fresh_k.shape
    num_pages, num_keys = -(-retained * num_kv_heads // slots_per_page), retained + num_fresh
    width = num_kv_heads * head_dim
    of_request = max(num_keys * width, num_pages * page_size)
    copies = fresh_k.new_empty(2 * group * of_request)
    # Views are made in one call each: together, they take as long as copying does.
    for i, request in enumerate(members):
        table = tokens.page_tables[request, :num_pages]
        for pages, start in ((tokens.k_pages, i * of_request), (tokens.v_pages, (group + i) * of_request)):
            copy = copies.as_strided((num_pages, slots_per_page, head_dim), (page_size, head_dim, 1), start)
            torch.index_select(pages, 0, table, out=copy)
    shape, strides = (group, num_kv_heads, num_keys, head_dim), (of_request, head_dim, width, 1)
    keys, values = (copies.as_strided(shape, strides, start) for start in (0, group * of_request))
    if num_fresh:
        keys.narrow(2, retained, num_fresh).copy_(fresh_k)
        values.narrow(2, retained, num_fresh).copy_(fresh_v)
    return keys, values


def gather_ragged(
    fresh_k: torch.Tensor, fresh_v: torch.Tensor, tokens: PagedTokens, members: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of requests whose heads have tokens of their own, fresh ones first, and which of them exist.

    ``[group, num_kv_heads, fresh rows and longest head, head_dim]`` twice, with zeros where there is none, and bool
    ``[group, num_kv_heads, 1, fresh rows and longest head]``.
    """
    slots_per_page, head_len = tokens.k_pages.shape[1], tokens.head_len[members, :, None]
    numbers = torch.arange(int(head_len.max()), device=head_len.device)
    exists = numbers < head_len
    virtual = tokens.head_start[members, :, None] + numbers * tokens.token_stride[members, None, None]
    virtual = torch.where(exists, virtual, 0)
    pages = tokens.page_tables[members].gather(1, (virtual // slots_per_page).flatten(1)).view_as(virtual).long()
    # For tokens that do not exist, any page that does.
    where = torch.where(exists, pages, 0), virtual % slots_per_page
    absent = ~exists[..., None]
    keys = torch.cat((fresh_k, tokens.k_pages[where].masked_fill_(absent, 0)), dim=2)
    values = torch.cat((fresh_v, tokens.v_pages[where].masked_fill_(absent, 0)), dim=2)
    return keys, values, F.pad(exists, (fresh_k.shape[2], 0), value=True)[:, :, None]


def numbers_of_keys(num_fresh: int, num_keys: int, head_len: torch.Tensor) -> torch.Tensor:
    """The numbers that limits count keys by: int ``[group, num_kv_heads, num_keys]``, of the fresh ones first, which
    lie behind those of ``head_len`` ``[group, num_kv_heads]``."""
    fresh, retained = (torch.arange(count, device=head_len.device) for count in (num_fresh, num_keys - num_fresh))
    behind = head_len[..., None] + fresh
    return torch.cat((behind, retained.expand(*head_len.shape, -1)), dim=-1)


def limited_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    numbers: torch.Tensor | None,
    limits: Sequence[int],
) -> None:
    """As ``softmax_attention``, for rows that see the keys whose ``numbers`` are below their ``limits``; None: the keys
    lie by number."""
    runs = runs_of_limits(limits, len(q)) if numbers is None else None
    parts = runs or masks_of_limits(k, visible, numbers, limits)
    for rows, num_keys, mask in parts:
        of_rows = None if lse is None else lse[:, rows]
        softmax_attention(out[:, rows], of_rows, q[:, rows], k[:, :, :num_keys], v[:, :, :num_keys], mask)


def runs_of_limits(limits: Sequence[int], num_members: int) -> list[SeenKeys] | None:
    """Neighbouring rows of equal limit, which need no mask; None where a mask costs less than a call for each run."""
    sizes = [(limit, len(list(run))) for limit, run in itertools.groupby(limits)]
    if len(sizes) > max(2 if num_members == 1 else 1, len(limits) // _ROWS_PER_CALL):
        return None
    stops = itertools.accumulate(size for _, size in sizes)
    return [(slice(stop - size, stop), limit, None) for (limit, size), stop in zip(sizes, stops, strict=True)]


def masks_of_limits(
    k: torch.Tensor, visible: torch.Tensor | None, numbers: torch.Tensor | None, limits: Sequence[int]
) -> Iterator[SeenKeys]:
    """A few rows at a time, so that what each of them sees is never held of all."""
    for start in range(0, len(limits), _MASKED_ROWS):
        rows = slice(start, start + _MASKED_ROWS)
        bounds, num_keys, in_order = torch.tensor(limits[rows], device=k.device), k.shape[2], numbers
        if in_order is None:  # keys that no row sees come last
            num_keys = min(num_keys, max(limits[rows]))
            in_order = torch.arange(num_keys, device=k.device)[None, None]
        seen = in_order[:, :, None, :num_keys] < bounds[:, None]
        if visible is not None:
            seen &= visible[..., :num_keys]
        yield rows, num_keys, seen


def softmax_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
) -> None:
    """Attend within each member of a group.

    Args:
        out: where to write the result, ``[group, num_rows, num_heads, head_dim]``.
        lse: where to write the logarithms of the denominators, float32 ``[group, num_rows, num_heads]``.
        q: as ``out``.
        k, v: ``[group, num_kv_heads, num_keys, head_dim]``.
        visible: bool, broadcast to ``[group, num_kv_heads, num_rows, num_keys]``; None: everything.
    """
    group, num_rows, num_heads, head_dim = q.shape
    num_kv_heads, num_keys = k.shape[1:3]
    sharing = num_heads // num_kv_heads
    # Query heads that share a KV head become further rows of it, so that K and V are not expanded.
    queries = q.view(group, num_rows, num_kv_heads, sharing, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if visible is not None and visible.shape[2] > 1:
        visible = visible.repeat(1, 1, sharing, 1)
    if lse is None:
        if not num_keys:
            out.zero_()
            return
        # Gives zeros where nothing is visible.
        attended = F.scaled_dot_product_attention(queries, k, v, attn_mask=visible)
    elif visible is None and num_keys and not q.is_cuda:
        # What scaled_dot_product_attention calls on a CPU; only by this name does it tell the denominators. Scores of
        # all rows and keys are never held at once.
        attended, of_queries = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, k, v)
    else:
        attended, of_queries = torch.empty_like(queries), queries.new_empty(queries.shape[:3], dtype=torch.float32)
        for head in range(num_kv_heads):  # scores of all heads would take gigabytes
            scores = queries[:, head].float() @ k[:, head].float().transpose(1, 2) * head_dim**-0.5
            if visible is not None:
                scores.masked_fill_(~visible[:, head % visible.shape[1]], -torch.inf)
            total = scores.logsumexp(dim=-1, keepdim=True)
            weights = (scores - total.clamp(min=torch.finfo(total.dtype).min)).exp_()
            attended[:, head], of_queries[:, head] = weights @ v[:, head].float(), total[..., 0]
    apart = group, num_kv_heads, sharing, num_rows
    out.view(group, num_rows, num_kv_heads, sharing, head_dim).copy_(
        attended.view(*apart, head_dim).permute(0, 3, 1, 2, 4)
    )
    if lse is not None:
        lse.view(group, num_rows, num_kv_heads, sharing).copy_(of_queries.view(apart).permute(0, 3, 1, 2))
