"""Page tables of requests, in the pool."""

from itertools import takewhile
from operator import eq
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from dllm_engine.cache_methods.base import CacheMethod
from dllm_engine.cache_methods.page_demand import PageDemand
from dllm_engine.decoding.messages import DiffusionSchedulerOutput
from dllm_engine.decoding.page_layout import (
    PageCounts,
    PageKind,
    PoolGeometry,
    pages_for,
)
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.page_pool import PagePool, prefix_keys
from dllm_engine.scheduler.scheduled_request import ScheduledRequest
from dllm_engine.text import readable_size


class SharedPages(NamedTuple):
    """Pages of other requests that a request begins with."""

    tables: list[list[KVCacheBlock]]
    num_anchors: int
    """New pages before them, in each table."""
    num_found: int
    """Pages of each table that other requests can find already."""
    copied: list[KVCacheBlock]
    """Page per table whose copy becomes the next page of the table; empty: no copies.
    """


class PageTables:
    """Pages that the steps of requests read and write. If the pool shares pages,
    requests that begin with the same tokens share the pages of these tokens.
    """

    def __init__(
        self,
        method: CacheMethod,
        geometry: PoolGeometry,
        pages: PagePool,
        watermark: float,
        num_anchors: int = 0,
    ) -> None:
        """``watermark``: share of the pages left for running requests to grow into,
        when another request is admitted beside them. ``num_anchors``: number of pages
        at each end of the shared pages that a request fills again.
        """
        if pages.shares and pages.hash_block_size != geometry.page_size:
            raise ValueError(
                f"block_size={pages.hash_block_size}: prefixes are shared by pages of "
                f"page_size={geometry.page_size} tokens; leave block_size unset"
            )
        self.demand = PageDemand(method, geometry)
        self.geometry = geometry
        self.pages = pages
        self.watermark = watermark if method.keeps_for_good else 0.0
        self.num_anchors = num_anchors
        self.prefix_stats = PrefixCacheStats()
        self._being_filled: set[BlockHash] = set()
        """Keys of the pages that the current step fills for good."""

    def begin_step(self) -> None:
        self._being_filled.clear()
        self.pages.begin_step()

    def find_prefix(self, state: ScheduledRequest) -> SharedPages | None:
        """Pages of other requests that hold the beginning of a waiting request. None:
        the current step fills the next page, and the request should wait for it.
        """
        keys: list[BlockHash] = []
        # The last row predicts the first token of a block, so it has to be computed.
        unseeded = state.request.num_tokens - state.spec.layout.seeds_blocks
        num_final = self._num_final(state, unseeded)
        if not state.request.skip_reading_prefix_cache:
            keys = self._new_keys(state, num_final)
        found_pages = self.pages.find(keys, self.geometry.num_layers)
        num_found = len(found_pages[0]) if found_pages else 0
        if self._being_filled.intersection(keys[num_found : num_found + 1]):
            return None
        first = self.num_anchors
        stop = num_found - self.num_anchors
        if stop <= first:
            found_pages, first, stop = [], 0, 0
        progress = state.progress
        size = self.geometry.page_size
        progress.num_anchored = first * size
        progress.retained = progress.num_shared = stop * size
        tables = [table[first:stop] for table in found_pages]
        shared = SharedPages(tables, first, num_found, [])
        if not tables or not self._shares_by_token(state):
            return shared
        following = self.pages.find_next(tables[0][-1])
        if following is None:
            return shared
        own_tokens = state.request.all_token_ids[progress.retained : num_final]
        num_equal = sum(takewhile(bool, map(eq, following.tokens, own_tokens)))
        num_shared = state.spec.layout.final_before(progress.retained + num_equal)
        if num_shared <= progress.retained:
            return shared
        progress.retained = progress.num_shared = num_shared
        return shared._replace(copied=following.pages)

    def _shares_by_token(self, state: ScheduledRequest) -> bool:
        """Return True if requests may share a part of a page, because its tokens are
        never computed again.
        """
        for_good = self.demand.method.keeps_for_good or state.spec.decision is not None
        return for_good and not self.num_anchors

    def reserve(
        self,
        state: ScheduledRequest,
        shared: SharedPages,
        kept_free: float,
        output: DiffusionSchedulerOutput,
        num_running: int,
    ) -> bool:
        """Reserve the pages that a request needs to begin with the ``shared`` pages.
        Return False if the pool has not enough pages for this and for the pages that
        must stay free. ``output`` gets the pages that are copied.

        ``kept_free``: share of all pages that the request's source leaves to others.
        ``num_running``: number of running requests, which may need more pages.
        """
        running = state.progress.running
        demand = self.demand.at_admission(state.spec, running)
        num_pages = self.pages.num_pages
        watermark = int(self.watermark * num_pages) if num_running else 0
        spare = max(watermark, int(kept_free * num_pages))
        request_id = state.request_id
        tables, num_anchors, num_found, copied = shared
        if not self.pages.can_reserve(demand + spare, tables):
            return False
        self.pages.reserve(request_id, demand, tables, num_anchors, num_found)
        if copied:
            copies = self.pages.append_copies(request_id, copied)
            output.page_copies[request_id] = copies
        return True

    def grow(self, state: ScheduledRequest) -> bool:
        """Reserve the pages that the running blocks need, if there is room."""
        running = state.progress.running
        needed = self.demand.num_held(state.spec, running)
        return self.pages.grow(state.request_id, needed)

    def record_prefix(self, state: ScheduledRequest) -> None:
        """Count the tokens of a starting request that were found in pages."""
        request = state.request
        if self.pages.shares and not request.skip_reading_prefix_cache:
            self.prefix_stats.record(
                request.num_tokens,
                state.progress.num_read,
                preempted=request.num_preemptions > 0,
            )

    def note_filled(self, state: ScheduledRequest, retained: int) -> None:
        """Note that the current step fills pages up to so many tokens."""
        num_final = self._num_final(state, retained)
        self._being_filled.update(self._new_keys(state, num_final))

    def share(self, state: ScheduledRequest) -> None:
        """Let other requests find the pages that a step has filled for good."""
        progress = state.progress
        num_keyed = self.pages.num_keyed[state.request_id]
        for_good = self.demand.method.keeps_for_good
        num_final = progress.retained if for_good else progress.num_shared
        self._add_keys(state, num_final)
        if self._shares_by_token(state):
            self._note_next(state, max(num_keyed, 1), num_final)

    def give_back(self, state: ScheduledRequest) -> None:
        """Free all pages of a request that has ended. The next turn of a chat may find
        the pages of the response, because no step renews them any more.
        """
        failed = state.request.status is RequestStatus.FINISHED_ERROR
        # vLLM may not have hashed given tokens.
        if state.num_in_order and not failed and not state.spec.layout.template:
            self._add_keys(state, self._num_kept(state))
        self.pages.free(state.request_id)

    def _add_keys(self, state: ScheduledRequest, num_tokens: int) -> None:
        if keys := self._new_keys(state, num_tokens):
            num_tables = self.geometry.num_layers
            self.pages.add_keys(state.request_id, keys, num_tables)

    def _note_next(self, state: ScheduledRequest, first: int, retained: int) -> None:
        """Let other requests find the prompt's pages from ``first`` on by the pages
        before them.
        """
        prompt = state.request.prompt_token_ids or []
        size = self.geometry.page_size
        num_tables = self.geometry.num_layers
        for number in range(first, self.pages.num_keyed[state.request_id] + 1):
            start = number * size
            if tokens := prompt[start : min(start + size, retained)]:
                self.pages.note_next(state.request_id, number, tokens, num_tables)

    def _num_kept(self, state: ScheduledRequest) -> int:
        """Number of decided tokens at the beginning of the canvas whose keys and values
        a request's tables hold in order."""
        if self.demand.method.keeps_for_good:
            # Tables may have room for more: for the rest of a long prompt, or for the
            # running block.
            return state.progress.retained
        per_layer = state.page_counts.get(PageKind.KV, [0])
        return min(state.num_in_order, min(per_layer) * self.geometry.page_size)

    def _num_final(self, state: ScheduledRequest, num_tokens: int) -> int:
        """Number of tokens among the first ``num_tokens`` that are never computed
        again.
        """
        if self.demand.method.keeps_for_good:
            return num_tokens
        return state.spec.num_sharable or 0

    def update(
        self,
        state: ScheduledRequest,
        output: DiffusionSchedulerOutput,
        *,
        needs_pages: bool,
    ) -> None:
        """Give a request the pages of the guide, and with ``needs_pages`` the pages
        that a step of the running blocks writes. ``output`` gets the tables that
        change.
        """
        counts = state.page_counts | self.demand.guide(state.spec)
        if needs_pages and not state.has_final_pages:
            running = state.progress.running
            counts |= self.demand.held(state.spec, running)
        if counts != state.page_counts:
            output.page_tables[state.request_id] = self._resize(state, counts)
        num_held = sum(map(sum, counts.values()))
        state.progress.pages_held = max(state.progress.pages_held, num_held)

    def release_unused(self, state: ScheduledRequest, kv_slots: int) -> None:
        """Free the pages that were reserved for the worst case. The table loses only
        its last pages, which are empty.
        """
        slots_per_page = self.geometry.page_size * self.geometry.num_kv_heads
        needed = [pages_for(kv_slots, slots_per_page)]
        self._resize(state, state.page_counts | {PageKind.KV: needed})
        self.pages.release_unused(state.request_id)
        state.has_final_pages = True

    def take_away(self, state: ScheduledRequest) -> None:
        """Free all pages of a request that is preempted."""
        self.pages.free(state.request_id)
        state.page_counts = {}
        state.progress.retained = 0
        state.num_in_order = 0

    def forget_prefixes(self) -> bool:
        """Let no request find pages of earlier requests. Return False if requests hold
        pages, and nothing was changed.
        """
        self.prefix_stats.reset = self.pages.shares and self.pages.forget_keys()
        return self.prefix_stats.reset or not self.pages.shares

    def take_prefix_stats(self) -> PrefixCacheStats:
        """Take the counts since the last call."""
        stats = self.prefix_stats
        self.prefix_stats = PrefixCacheStats()
        return stats

    def _new_keys(self, state: ScheduledRequest, num_tokens: int) -> list[BlockHash]:
        """Keys of the pages that a request's first tokens fill for good, without the
        pages that other requests can find already.
        """
        if not self.pages.shares:
            return []
        size = self.geometry.page_size
        numbers = range(self.pages.num_keyed[state.request_id], num_tokens // size)
        return prefix_keys(state.request.block_hashes, size, state.spec.layout, numbers)

    def _resize(
        self, state: ScheduledRequest, counts: PageCounts
    ) -> dict[str, list[list[int]]]:
        state.page_counts = counts
        sizes = [size for per_layer in counts.values() for size in per_layer]
        tables = iter(self.pages.resize(state.request_id, sizes))
        return {
            kind: [next(tables) for _ in per_layer]
            for kind, per_layer in counts.items()
        }


def pool_log_line(
    options: EngineOptions, geometry: PoolGeometry, pages: PagePool, page_bytes: int
) -> str:
    """Log line that says what the pool's pages hold."""
    cache_options = options.cache.model_dump() or ""
    method = f"cache_method={options.cache_method!r} {cache_options}".strip()
    if not options.uses_pages:
        return f"{method}: every step computes the whole canvas, no pages are kept"
    page_size = geometry.page_size
    num_layers = geometry.num_layers
    num_tokens = pages.num_pages // num_layers * page_size
    page = readable_size(page_bytes)
    pool = readable_size(pages.num_pages * page_bytes)
    return (
        f"{method}: {pages.num_pages:,} pages of {page_size} tokens of one "
        f"layer ({page} each, together {pool}) retain {num_tokens:,} tokens of "
        f"each of the {num_layers} layers"
    )
