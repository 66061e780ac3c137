"""Page tables of requests, in the pool."""

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.metrics.stats import PrefixCacheStats

from dllm_engine.decoding.page_layout import (
    PageCounts,
    PageKind,
    PoolGeometry,
    pages_for,
)
from dllm_engine.scheduler.page_pool import PagePool, prefix_keys
from dllm_engine.scheduler.request_state import RequestState


class PageTables:
    """Which pages the steps of requests read and write. With ``shares_prefixes``,
    requests that begin with the same tokens share those that hold them.
    """

    def __init__(
        self, pages: PagePool, geometry: PoolGeometry, *, shares_prefixes: bool
    ) -> None:
        self.pages = pages
        self.geometry = geometry
        self.shares_prefixes = shares_prefixes
        self.prefix_stats = PrefixCacheStats()
        self._being_filled: set[BlockHash] = set()
        """Keys of the pages that the step in hand fills for good."""

    def begin_step(self) -> None:
        self._being_filled.clear()

    def find_prefix(self, state: RequestState) -> list[list[KVCacheBlock]] | None:
        """Pages of other requests that hold the beginning of one that waits, per table.
        None: the step in hand fills the next one, which is worth waiting for.
        """
        keys: list[BlockHash] = []
        if not state.request.skip_reading_prefix_cache:
            keys = self._new_keys(state, state.request.num_tokens)
        shared = self.pages.find(keys, self.geometry.num_layers)
        num_shared = len(shared[0]) if shared else 0
        if self._being_filled.intersection(keys[num_shared : num_shared + 1]):
            return None
        state.progress.retained = num_shared * self.geometry.page_size
        return shared

    def record_prefix(self, state: RequestState) -> None:
        """Count what a request that begins found of its tokens."""
        request = state.request
        if self.shares_prefixes and not request.skip_reading_prefix_cache:
            self.prefix_stats.record(
                request.num_tokens,
                state.progress.retained,
                preempted=request.num_preemptions > 0,
            )

    def fill(self, state: RequestState, retained: int) -> None:
        """Note that the step in hand fills pages up to so many tokens."""
        self._being_filled.update(self._new_keys(state, retained))

    def share(self, state: RequestState) -> None:
        """Let others find the pages that a step has filled for good."""
        if keys := self._new_keys(state, state.progress.retained):
            self.pages.add_keys(state.request_id, keys)

    def hold(
        self, state: RequestState, counts: PageCounts
    ) -> dict[PageKind, list[list[int]]] | None:
        """Give a request so many pages; returns its tables, None if they stay."""
        state.progress.pages_held = max(
            state.progress.pages_held, sum(map(sum, counts.values()))
        )
        return None if counts == state.page_counts else self._resize(state, counts)

    def settle(self, state: RequestState, kv_slots: int) -> None:
        """Give back what was reserved for the worst case. The table loses its last
        pages only, which hold nothing.
        """
        slots_per_page = self.geometry.page_size * self.geometry.num_kv_heads
        needed = [pages_for(kv_slots, slots_per_page)]
        self._resize(state, state.page_counts | {PageKind.KV: needed})
        self.pages.settle(state.request_id)
        state.pages_settled = True

    def take_away(self, state: RequestState) -> None:
        """Take all pages of a request that is preempted."""
        self.pages.free(state.request_id)
        state.page_counts, state.progress.retained = {}, 0

    def forget_prefixes(self) -> bool:
        """Let no request find the pages of those before it; returns False if that
        cannot be done, because requests hold pages.
        """
        self.prefix_stats.reset = self.shares_prefixes and self.pages.forget_keys()
        return self.prefix_stats.reset or not self.shares_prefixes

    def take_prefix_stats(self) -> PrefixCacheStats:
        """What was counted since the last call."""
        taken, self.prefix_stats = self.prefix_stats, PrefixCacheStats()
        return taken

    def _new_keys(self, state: RequestState, num_tokens: int) -> list[BlockHash]:
        """Keys of the pages that a request's first tokens fill for good, without those
        that others can find already.
        """
        if not self.shares_prefixes:
            return []
        size = self.geometry.page_size
        numbers = range(self.pages.num_keyed[state.request_id], num_tokens // size)
        return prefix_keys(
            state.request.block_hashes, size, state.spec.layout.block_length, numbers
        )

    def _resize(
        self, state: RequestState, counts: PageCounts
    ) -> dict[PageKind, list[list[int]]]:
        state.page_counts = counts
        sizes = [size for per_layer in counts.values() for size in per_layer]
        tables = iter(self.pages.resize(state.request_id, sizes))
        return {
            kind: [next(tables) for _ in per_layer]
            for kind, per_layer in counts.items()
        }
