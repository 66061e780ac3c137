"""Pages: fixed-size blocks of cache memory, owned by vLLM's ``BlockPool`` and handed out per request."""

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock


class PagePool:
    """Reserves a request's upper bound at admission and allocates pages when they are needed.

    A request may only allocate what it reserved, so a running request never finds the pool empty: no preemption.
    """

    def __init__(self, num_pages: int, hash_block_size: int) -> None:
        """``num_pages`` counts vLLM's null block, which is never handed out."""
        self._blocks = BlockPool(num_pages, enable_caching=False, hash_block_size=hash_block_size)
        self._reserved: dict[str, int] = {}
        self._tables: dict[str, list[list[KVCacheBlock]]] = {}

    @property
    def num_pages(self) -> int:
        """Pages that can be handed out."""
        return self._blocks.num_gpu_blocks - 1

    @property
    def num_reserved(self) -> int:
        return sum(self._reserved.values())

    @property
    def num_allocated(self) -> int:
        return self.num_pages - self._blocks.get_num_free_blocks()

    @property
    def usage(self) -> float:
        """Share of the pages that is reserved, 0 to 1."""
        return self.num_reserved / self.num_pages if self.num_pages else 0.0

    def can_reserve(self, num_pages: int) -> bool:
        return self.num_reserved + num_pages <= self.num_pages

    def reserve(self, request_id: str, num_pages: int) -> None:
        """Set ``num_pages`` aside for a request; raises ``ValueError`` where they are not there."""
        if request_id in self._reserved:
            raise ValueError(f"request {request_id} has reserved pages already")
        if not self.can_reserve(num_pages):
            raise ValueError(f"{num_pages} pages wanted, {self.num_pages - self.num_reserved} of {self.num_pages} left")
        self._reserved[request_id] = num_pages
        self._tables[request_id] = []

    def resize(self, request_id: str, table_sizes: list[int]) -> list[list[int]]:
        """Resize a request's page tables, in pages; returns the page ids of each.

        A table grows and shrinks at its end. Raises ``ValueError`` beyond the request's reservation.
        """
        if sum(table_sizes) > self._reserved[request_id]:
            raise ValueError(
                f"request {request_id} wants {sum(table_sizes)} pages, but reserved {self._reserved[request_id]}"
            )
        tables = self._tables[request_id]
        tables.extend([] for _ in range(len(table_sizes) - len(tables)))
        # All surplus first, so that a table may grow on what another gave back.
        for table, size in zip(tables, table_sizes, strict=True):
            self._blocks.free_blocks(table[size:])
            del table[size:]
        for table, size in zip(tables, table_sizes, strict=True):
            table.extend(self._blocks.get_new_blocks(size - len(table)))
        return [[page.block_id for page in table] for table in tables]

    def settle(self, request_id: str) -> None:
        """Give back what a request reserved beyond the pages it holds."""
        self._reserved[request_id] = sum(map(len, self._tables[request_id]))

    def free(self, request_id: str) -> None:
        """Return a request's pages and its reservation; nothing happens for a request that has none."""
        self._reserved.pop(request_id, None)
        for table in self._tables.pop(request_id, []):
            self._blocks.free_blocks(table)
