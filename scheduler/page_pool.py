"""Pages: fixed-size blocks of cache memory, owned by vLLM's ``BlockPool`` and handed
out per request.

Requests share pages with equal content, by vLLM's prefix caching: a page that is filled
for good gets a key, stays in the pool when its request ends, and is found by the next
request with that key until the pool needs its memory. After the last shared page, a
request may begin with a copy of a page whose first tokens are its own.
"""

import struct
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import NamedTuple, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.request import Request

from dllm_engine.decoding.canvas_layout import CanvasLayout


def prefix_keys(
    hashes: Sequence[BlockHash], page_size: int, layout: CanvasLayout, pages: range
) -> list[BlockHash]:
    """Keys of these pages of a text, as many as vLLM's hashes of the text allow. The
    content of a page depends on all tokens up to the end of the last block that it
    touches, and on where blocks begin. With full attention it depends on all later
    tokens too, but requests that share prompts ignore that."""
    keys = []
    length = layout.attended_length
    lead = layout.lead
    if layout.attention != "block_causal":
        length = 1
        lead = 0
    for page in pages:
        block_end = layout.final_stop((page + 1) * page_size - 1)
        last = -(-block_end // page_size) - 1
        if last >= len(hashes):
            break
        keys.append(
            BlockHash(hashes[last] + struct.pack("<III", length, lead, last - page))
        )
    return keys


class NextPage(NamedTuple):
    """The pages that followed a page in a request: one of each table."""

    tokens: Sequence[int]
    """The first tokens of the pages, which are filled for good."""
    pages: list[KVCacheBlock]
    times_given: list[int]
    """Number of times that each of the pages had been given to requests."""


class PagePool:
    """Pool that reserves pages for a request at admission and allocates them when they
    are needed. A request that has not reserved all the pages that it may need asks for
    more with ``grow``."""

    def __init__(
        self, num_pages: int, hash_block_size: int, *, shares: bool = False
    ) -> None:
        """``num_pages`` counts vLLM's null block, which is never handed out.
        ``hash_block_size``: tokens per hash of vLLM's, and per page if requests share
        pages."""
        self.hash_block_size = hash_block_size
        self.shares = shares
        self._blocks = BlockPool(
            num_pages, enable_caching=shares, hash_block_size=hash_block_size
        )
        self._reserved: dict[str, int] = {}
        self._tables: dict[str, list[list[KVCacheBlock]]] = {}
        self._num_held = 0
        """Pages of all tables; a shared page counts once per table."""
        self.num_keyed: Counter[str] = Counter()
        """Pages of each table of a request that others can find."""
        self._next_pages: dict[int, NextPage] = {}
        """Next pages by the id of the page before them, in the first table of the
        latest request.
        """
        self._times_given: Counter[int] = Counter()
        """Number of times that a page has been given to requests, by page id."""
        self._given_now: Counter[int] = Counter()
        """Number of times that a page has been given out in the current step, by page
        id. The step copies pages before it overwrites them.
        """

    @property
    def num_pages(self) -> int:
        return self._blocks.num_gpu_blocks - 1

    @property
    def num_reserved(self) -> int:
        """Pages that requests hold, where a shared page counts once, and pages that
        they may still allocate.
        """
        return self.num_allocated + sum(self._reserved.values()) - self._num_held

    @property
    def num_allocated(self) -> int:
        return self.num_pages - self._blocks.get_num_free_blocks()

    def begin_step(self) -> None:
        self._given_now.clear()

    def find(
        self, keys: Sequence[BlockHash], num_tables: int
    ) -> list[list[KVCacheBlock]]:
        """Pages of the longest prefix that all of ``num_tables`` tables have, per
        table.
        """
        pages_by_key = []
        for key in keys:
            pages = self._blocks.get_cached_block(key, list(range(num_tables)))
            if pages is None:
                break
            pages_by_key.append(pages)
        return [list(table) for table in zip(*pages_by_key, strict=True)]

    def can_reserve(
        self, num_pages: int, shared: Sequence[Sequence[KVCacheBlock]] = ()
    ) -> bool:
        """Return True if the pool has room for ``num_pages``, including the ``shared``
        pages from ``find``."""
        held_by_others = sum(page.ref_cnt > 0 for page in chain.from_iterable(shared))
        return self.num_reserved + num_pages - held_by_others <= self.num_pages

    def reserve(
        self,
        request_id: str,
        num_pages: int,
        shared: Sequence[Sequence[KVCacheBlock]] = (),
        num_own: int = 0,
        num_keyed: int = 0,
    ) -> None:
        """Reserve ``num_pages`` for a request; ``can_reserve`` must be True for them.
        Its tables begin with ``num_own`` new pages and then the ``shared`` pages.
        ``num_keyed``: pages of its text that other requests can find.
        """
        self._reserved[request_id] = num_pages
        self._blocks.touch([*chain.from_iterable(shared)])
        self._tables[request_id] = [
            [*self._new_pages(num_own), *table] for table in shared
        ]
        self._num_held += sum(map(len, self._tables[request_id]))
        self.num_keyed[request_id] = num_keyed

    def grow(self, request_id: str, num_pages: int) -> bool:
        """Raise a request's reservation to ``num_pages`` if it is smaller. Return False
        if the pool has no room.
        """
        more = num_pages - self._reserved[request_id]
        if more > 0 and not self.can_reserve(more):
            return False
        self._reserved[request_id] += max(more, 0)
        return True

    def add_keys(
        self, request_id: str, keys: Sequence[BlockHash], num_tables: int
    ) -> None:
        """Let other requests find the next pages of a request's first tables, which are
        filled for good.
        """
        before = self.num_keyed[request_id]
        after = before + len(keys)
        size = self._blocks.hash_block_size
        # ``BlockPool`` reads no other attribute of a request.
        request = cast(
            Request, SimpleNamespace(block_hashes=[BlockHash(b"")] * before + [*keys])
        )
        for number, table in enumerate(self._tables[request_id][:num_tables]):
            self._blocks.cache_full_blocks(request, table, before, after, size, number)
        self.num_keyed[request_id] = after

    def note_next(
        self, request_id: str, number: int, tokens: Sequence[int], num_tables: int
    ) -> None:
        """Let other requests find a request's pages of this number by the pages before
        them. The first ``tokens`` of these pages are filled for good.
        """
        tables = self._tables[request_id][:num_tables]
        pages = [table[number] for table in tables]
        times_given = [self._times_given[page.block_id] for page in pages]
        before = tables[0][number - 1].block_id
        self._next_pages[before] = NextPage(tokens, pages, times_given)

    def find_next(self, page: KVCacheBlock) -> NextPage | None:
        """The pages that followed a page of the first table, if their content is the
        same when the current step begins.
        """
        following = self._next_pages.get(page.block_id)
        if following is None:
            return None
        ids = [page.block_id for page in following.pages]
        times_given = [self._times_given[i] - self._given_now[i] for i in ids]
        return following if times_given == following.times_given else None

    def append_copies(
        self, request_id: str, pages: Sequence[KVCacheBlock]
    ) -> tuple[list[int], list[int]]:
        """Append to each of a request's first tables a new page, which has to become a
        copy of one of ``pages``. Returns the ids of the originals and of the copies.
        """
        sources = [page.block_id for page in pages]
        copies = self._new_pages(len(pages))
        tables = self._tables[request_id]
        for table, page in zip(tables, copies, strict=True):
            table.append(page)
        self._num_held += len(copies)
        return sources, [page.block_id for page in copies]

    def _new_pages(self, count: int) -> list[KVCacheBlock]:
        pages = self._blocks.get_new_blocks(count)
        for page in pages:
            self._next_pages.pop(page.block_id, None)
        ids = [page.block_id for page in pages]
        self._times_given.update(ids)
        self._given_now.update(ids)
        return pages

    def forget_keys(self) -> bool:
        """Remove all keys, so that no page is found any more. Return False if requests
        hold pages, and nothing was removed.
        """
        return self._blocks.reset_prefix_cache()

    def resize(self, request_id: str, table_sizes: list[int]) -> list[list[int]]:
        """Resize a request's page tables at their ends; returns the page ids of each.
        Raises ``ValueError`` beyond the request's reservation."""
        if sum(table_sizes) > self._reserved[request_id]:
            raise ValueError(
                f"request {request_id} wants {sum(table_sizes)} pages, but reserved "
                f"{self._reserved[request_id]}"
            )
        tables = self._tables[request_id]
        tables.extend([] for _ in range(len(table_sizes) - len(tables)))
        self._num_held += sum(table_sizes) - sum(map(len, tables))
        # Free all surplus pages first, so that another table can take them.
        for table, size in zip(tables, table_sizes, strict=True):
            self._blocks.free_blocks(table[size:])
            del table[size:]
        for table, size in zip(tables, table_sizes, strict=True):
            table.extend(self._new_pages(size - len(table)))
        return [[page.block_id for page in table] for table in tables]

    def release_unused(self, request_id: str) -> None:
        """Reduce a request's reservation to the pages that it holds."""
        self._reserved[request_id] = sum(map(len, self._tables[request_id]))

    def free(self, request_id: str) -> None:
        """Return a request's pages and its reservation, if it has any."""
        self._reserved.pop(request_id, None)
        self.num_keyed.pop(request_id, None)
        tables = self._tables.pop(request_id, [])
        self._num_held -= sum(map(len, tables))
        pages = chain.from_iterable(map(enumerate, tables))
        # Pages that are freed first are used again first. The last pages go first,
        # because a page is useless without the pages before it.
        self._blocks.free_blocks(
            page for _, page in sorted(pages, key=lambda numbered: -numbered[0])
        )
