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
        self._allocated: dict[str, list[KVCacheBlock]] = {}

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
        self._allocated[request_id] = []

    def allocate(self, request_id: str, num_pages: int) -> list[int]:
        """Take ``num_pages`` of a request's reservation; returns their page ids."""
        held = self._allocated[request_id]
        if len(held) + num_pages > self._reserved[request_id]:
            raise ValueError(
                f"request {request_id} holds {len(held)} pages and wants {num_pages} more, "
                f"but reserved {self._reserved[request_id]}"
            )
        pages = self._blocks.get_new_blocks(num_pages)
        held.extend(pages)
        return [page.block_id for page in pages]

    def free(self, request_id: str) -> None:
        """Return a request's pages and its reservation; nothing happens for a request that has none."""
        self._reserved.pop(request_id, None)
        self._blocks.free_blocks(self._allocated.pop(request_id, []))
