"""Sizes of a request's tables in pages. A page has the bytes of ``page_size`` tokens of
one layer's keys and values on one rank. Its content depends on the kind of table.
"""

import math
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict


class PageKind:
    """Kinds of tables, by the content of their pages. A cache method may add kinds."""

    KV = "kv"
    """Keys and values, of this rank's KV heads."""
    FEATURES = "features"
    """Rows of activations."""
    GUIDE = "guide"
    """Keys and values of the guide model, of this rank's heads."""


PageCounts = dict[str, list[int]]
"""Pages per table: for each ``PageKind``, one number per layer, or one for a table that all
layers share.
"""


class GuideShape(BaseModel):
    """Sizes of a guide model that determine its pages, from its config."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_layers: int
    num_kv_heads: int
    head_dim: int
    same_tokens: bool = True
    """True if the guide has the tokenizer of the diffusion model."""
    tokens_per_token: float = 1.0
    """Tokens of the guide to reserve pages for, per token of the diffusion model."""

    def num_tokens(self, num_tokens: int) -> int:
        """Number of the guide's tokens for ``num_tokens`` of the diffusion model."""
        return math.ceil(num_tokens * self.tokens_per_token)


@dataclass(frozen=True)
class PoolGeometry:
    """Sizes of a model on one tensor-parallel rank, and of the pool's pages there."""

    page_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    total_kv_heads: int
    """KV heads of the whole model."""
    guide: GuideShape | None = None

    def kv_pages(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` of one layer, all heads of the rank."""
        return pages_for(num_tokens, self.page_size)

    @property
    def query_size(self) -> int:
        """Numbers in a row's query, of the heads of the rank."""
        return self.num_heads * self.head_dim

    def page_bytes(self, dtype_bytes: int) -> int:
        """Bytes of a page of numbers of ``dtype_bytes``."""
        return 2 * self.page_size * self.num_kv_heads * self.head_dim * dtype_bytes

    def feature_pages(self, num_rows: int, width: int) -> int:
        """Pages that hold ``num_rows`` rows of features of one layer. Raises
        ``ValueError`` if a page cannot hold a row.
        """
        return pages_for(num_rows, self._per_page(width, f"row of {width} features"))

    def guide_pages(self, num_tokens: int) -> PageCounts:
        """Pages of the guide's K/V for a text. Raises ``ValueError`` if a page cannot
        hold a token of the guide.
        """
        guide = self.guide
        assert guide is not None
        what = f"token of the guide's {guide.num_kv_heads} KV heads of {guide.head_dim}"
        per_page = self._per_page(2 * guide.num_kv_heads * guide.head_dim, what)
        return {
            PageKind.GUIDE: [pages_for(guide.num_tokens(num_tokens), per_page)]
            * guide.num_layers
        }

    def _per_page(self, size: int, what: str) -> int:
        per_token = 2 * self.num_kv_heads * self.head_dim
        if not (per_page := self.page_size * per_token // size):
            raise ValueError(
                f"page_size={self.page_size} is too small: a page of "
                f"{self.page_size * per_token} numbers holds no {what}; the smallest "
                f"that works is {pages_for(size, per_token)}"
            )
        return per_page

    def uniform(self, num_tokens: int) -> PageCounts:
        """Pages of K/V with equally many tokens in every layer."""
        return {PageKind.KV: [self.kv_pages(num_tokens)] * self.num_layers}


def pages_for(amount: int, per_page: int) -> int:
    """Number of pages for ``amount`` items, if a page holds ``per_page`` items."""
    return -(-amount // per_page)


def head_dim_of(hf_config: Any) -> int:
    stated: int | None = getattr(hf_config, "head_dim", None)
    return stated or hf_config.hidden_size // hf_config.num_attention_heads
