"""How many pages a request's tables take: a page is fixed bytes, and what it holds depends on the kind of table."""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class PageKind(Enum):
    """What the pages of a table hold."""

    KV = "kv"
    """Keys and values, of this rank's KV heads."""
    FEATURES = "features"
    """Rows of ``hidden_size`` activations."""
    RETAINED = "retained"
    """Keys and values again, of the tokens that eviction retained, where the whole canvas is kept as well."""


PageCounts = dict[PageKind, list[int]]
"""Pages per table: for each kind, one number per layer."""


@dataclass(frozen=True)
class PoolGeometry:
    """Sizes of a model on one tensor-parallel rank, and of the pool's pages there.

    A page has the bytes of ``page_size`` tokens of one layer's keys and values.
    """

    page_size: int
    num_layers: int
    num_kv_heads: int
    """KV heads of this rank."""
    head_dim: int
    hidden_size: int
    total_kv_heads: int
    """KV heads of the whole model."""

    @classmethod
    def of_model(cls, hf_config: Any, page_size: int, tensor_parallel_size: int) -> "PoolGeometry":
        return cls(
            page_size=page_size,
            num_layers=hf_config.num_hidden_layers,
            # With more ranks than KV heads each head is on several of them.
            num_kv_heads=max(1, hf_config.num_key_value_heads // tensor_parallel_size),
            head_dim=hf_config.hidden_size // hf_config.num_attention_heads,
            hidden_size=hf_config.hidden_size,
            total_kv_heads=hf_config.num_key_value_heads,
        )

    @property
    def feature_rows_per_page(self) -> int:
        """Whole feature rows that fit a page; 0 where a page is too small for one."""
        return 2 * self.page_size * self.num_kv_heads * self.head_dim // self.hidden_size

    def kv_pages(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` of one layer, all heads of the rank."""
        return pages_for(num_tokens, self.page_size)

    def feature_pages(self, num_rows: int) -> int:
        """Pages that hold ``num_rows`` of one layer's features; raises ``ValueError`` where a page holds no row."""
        if not self.feature_rows_per_page:
            per_token = 2 * self.num_kv_heads * self.head_dim
            raise ValueError(
                f"page_size={self.page_size} is too small: a page of {self.page_size * per_token} numbers holds no row "
                f"of {self.hidden_size} features; the smallest that works is {pages_for(self.hidden_size, per_token)}"
            )
        return pages_for(num_rows, self.feature_rows_per_page)

    def uniform(self, num_tokens: int) -> PageCounts:
        """Tables of K/V alone, with as many tokens in every layer."""
        return {PageKind.KV: [self.kv_pages(num_tokens)] * self.num_layers}


def pages_for(amount: int, per_page: int) -> int:
    """Pages that hold ``amount`` of what one page holds ``per_page`` of."""
    return -(-amount // per_page)
