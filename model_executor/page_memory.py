"""Tensors that hold the pages of one rank, and the spec by which vLLM sizes them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from dllm_engine.decoding.page_layout import PoolGeometry
from dllm_engine.kernels.pages import write_kv
from dllm_engine.model_executor.transfer import on_device

POOL_LAYER = "dllm.pool"
"""Name of the only layer in vLLM's KV cache config, a pseudo-layer. Its page is a page
of one of our layers.
"""


@dataclass(frozen=True, kw_only=True)
class PagePoolSpec(FullAttentionSpec):
    """One page: keys and values of ``block_size`` tokens in one layer, of this rank's
    heads.
    """

    pages_per_request: int = 1
    """Pages of a request as long as ``max_model_len``, over all layers."""

    @classmethod
    def merge(cls, specs: "list[PagePoolSpec]") -> "PagePoolSpec":
        """Merge the specs of several layers. vLLM's own method would fall back to one
        page per request.
        """
        (spec,) = specs  # the pool is the only pseudo-layer
        return spec

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return self.pages_per_request * self.page_size_bytes


@dataclass(frozen=True)
class PageView:
    """The pool's pages as keys and values of some model's heads."""

    keys: Tensor
    """``[num_pages, slots_per_page, head_dim]``"""
    values: Tensor
    """As ``keys``."""
    page_size: int
    """Tokens per page."""
    num_kv_heads: int
    """KV heads of this rank."""

    def write(
        self,
        k: Tensor,
        v: Tensor,
        slots: Tensor,
        rows: Tensor | None = None,
    ) -> None:
        """Write keys and values ``[n, num_kv_heads, head_dim]`` to physical slots, as
        ``write_kv`` does.
        """
        write_kv(k, v, self.keys, self.values, slots, rows)

    def slots(self, places: Tensor) -> Tensor:
        """Physical slots, int64 ``[..., num_kv_heads]``, of tokens at places ``page ·
        page_size + offset``, int64 ``[...]``. For place −1 the slots are below 0, and
        ``write`` ignores them."""
        return places[..., None] * self.num_kv_heads + self.heads

    @cached_property
    def heads(self) -> Tensor:
        """Numbers of the heads, int64."""
        return torch.arange(self.num_kv_heads, device=self.keys.device)


class PageMemory(PageView):
    """All pages of a rank. A slot holds the key or value of one head of one retained
    token. A page may hold rows of features instead, with ``hidden_size`` numbers each.
    Page 0 is vLLM's null block, which is never read."""

    def __init__(
        self,
        num_pages: int,
        geometry: PoolGeometry,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.geometry = geometry
        heads = geometry.num_kv_heads
        # Not zeroed, so that a CPU never touches the memory of unused pages.
        shape = num_pages, 2, geometry.page_size * heads, geometry.head_dim
        self.memory = torch.empty(shape, dtype=dtype, device=device)
        super().__init__(
            self.memory[:, 0], self.memory[:, 1], geometry.page_size, heads
        )

    @property
    def first_kv_head(self) -> int:
        """Number of this rank's first KV head in the model. With more ranks than KV
        heads, neighbouring ranks hold the same head.
        """
        ranks = get_tensor_model_parallel_world_size()
        rank = get_tensor_model_parallel_rank()
        return rank * self.geometry.total_kv_heads // ranks

    def copy(self, copies: Iterable[tuple[list[int], list[int]]]) -> None:
        """Copy pages. ``copies``: pairs of the ids of originals, and of the pages that
        become copies of them. All originals are read before any copy is written.
        """
        sources, targets = (
            on_device([*chain.from_iterable(ids)], self.memory.device)
            for ids in zip(*copies, strict=True)
        )
        self.memory[targets] = self.memory[sources]

    def view_for(self, num_kv_heads: int, head_dim: int) -> PageView:
        """View of the same pages for a model with other heads. A page holds as many
        whole tokens as fit.
        """
        pages = self.memory.flatten(1)
        page_size = pages.shape[1] // (2 * num_kv_heads * head_dim)
        slots = page_size * num_kv_heads
        keys, values = (
            pages[:, : 2 * slots * head_dim]
            .unflatten(1, (2, slots, head_dim))
            .unbind(1)
        )
        return PageView(keys, values, page_size, num_kv_heads)


def page_table(page_ids: list[list[int]], device: torch.device) -> Tensor:
    """Page ids of each layer as one table, ``[num_layers, most pages of a layer]``
    int32.
    """
    widest = max(map(len, page_ids))
    # Padding names page 0, which is never handed out. It is never read.
    padded = [pages + [0] * (widest - len(pages)) for pages in page_ids]
    return on_device(padded, device, torch.int32)
