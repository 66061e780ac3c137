r"""Reads and writes of pages: keys and values in slots, and rows of features.

A slot holds the key or value of one KV head of one token. A row of features is as wide
as the model's hidden states: a page of E = 2 · slots_per_page · head_dim elements holds
⌊E / width⌋ whole rows, one after the other, and leaves the rest unused. Row slot σ lies
in page σ // rows_per_page at place σ % rows_per_page; −1: no page. Rows without a slot
are never used in arithmetic: they may hold NaN.
"""

from typing import NamedTuple

from torch import Tensor

from dllm_engine.kernels._operator import Operator


@Operator
def write_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    rows: Tensor | None = None,
) -> None:
    """Write ``k[i, h]`` and ``v[i, h]`` to physical slot ``slots[i, h]``, or with
    ``rows`` to ``slots[rows[i], h]``.

    Args:
        k, v: ``[num_rows, num_kv_heads, head_dim]``.
        k_pages, v_pages: ``[num_pages, slots_per_page, head_dim]``.
        slots: ``page · slots_per_page + offset``, int64 ``[..., num_kv_heads]``. A row
            with a slot below 0 is not written, or is written to page 0, which belongs
            to no request. No other slot may occur twice.
        rows: int64 ``[num_rows]``, contiguous.
    """
    places = page_places(slots if rows is None else slots[rows], k_pages)
    k_pages[places], v_pages[places] = k, v


def page_places(slots: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Page of each slot and place in that page, for slots of keys and values or row
    slots. A slot below 0 counts as slot 0.
    """
    slots = slots.clamp(min=0)
    slots_per_page = pages.shape[1]
    return slots // slots_per_page, slots % slots_per_page


def feature_rows(memory: Tensor, width: int) -> Tensor:
    """View contiguous pages ``[num_pages, 2, slots_per_page, head_dim]`` as rows of
    ``width`` features, ``[num_pages, rows_per_page, width]``."""
    num_pages, _, slots_per_page, head_dim = memory.shape
    page_elements = 2 * slots_per_page * head_dim
    return memory.as_strided(
        (num_pages, page_elements // width, width), (page_elements, width, 1)
    )


class ComputedRows(NamedTuple):
    """Results of a layer for some rows, ``[num_computed_rows, width]`` each."""

    attended: Tensor
    """Output of the attention branch."""
    before_mlp: Tensor
    """Residual stream between the branches: the input of the feed-forward branch."""
    mlp_output: Tensor


@Operator
def add_or_renew_features(
    hidden: Tensor,
    rows: Tensor,
    slots: Tensor,
    places: Tensor,
    computed: ComputedRows,
) -> None:
    """Bring hidden states to the end of a layer that has ``computed`` some rows: a row
    with place p ≥ 0 becomes ``before_mlp[p] + mlp_output[p]``, and its features become
    ``mlp_output[p] + attended[p]``. To every other row its features are added. Nothing
    is converted to float32.

    Args:
        hidden: ``[num_rows, width]``, contiguous.
        rows: the result of ``feature_rows``.
        slots: row slots of the features, int64 ``[num_rows]``.
        places: index of each row in ``computed``, int64 ``[num_rows]``; −1: the row was
            not computed.
    """
    attended, before_mlp, mlp_output = computed
    is_computed = places >= 0
    has_slot = slots >= 0
    added = (has_slot & ~is_computed).nonzero().flatten()
    hidden.index_add_(0, added, rows[page_places(slots[added], rows)])
    hidden[is_computed] = (before_mlp + mlp_output)[places[is_computed]]
    renewed = has_slot & is_computed
    rows[page_places(slots[renewed], rows)] = (mlp_output + attended)[places[renewed]]
