r"""What is written to and read from pages: keys and values in slots, and rows of features.

A slot holds the key or value of one KV head of one token. A row of features is as wide as the model's hidden states: a
page of E = 2 · slots_per_page · head_dim elements holds ⌊E / width⌋ whole rows, one after the other, and leaves the
rest unused. Row slot σ lies in page σ // rows_per_page at place σ % rows_per_page:

    add_features:    hidden_i += rows_σ(i)
    write_features:  rows_σ(i) := values_i
    read_features:   result_i = rows_σ(i)

for every i with σ(i) ≥ 0; −1 stands for no row. Rows that no slot names are never used in arithmetic: they may hold
NaN. Arguments of these three: ``rows`` ``[num_pages, rows_per_page, width]``, as ``feature_rows`` gives them; ``slots``
int64 ``[num_rows]``; ``hidden`` and ``values`` ``[num_rows, width]``.
"""

import torch

from dllm_engine.kernels._operator import Operator


@Operator
def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write ``k[i, h]`` and ``v[i, h]`` to physical slot ``slots[i, h]``.

    Args:
        k, v: ``[num_rows, num_kv_heads, head_dim]``.
        k_pages, v_pages: ``[num_pages, slots_per_page, head_dim]``.
        slots: ``page · slots_per_page + offset``, int64 ``[num_rows, num_kv_heads]``. What is below 0 is not written,
            or to page 0, which is no request's. No other slot may be named twice.
    """
    places = page_places(slots, k_pages)
    k_pages[places], v_pages[places] = k, v


def page_places(slots: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Page of each slot, of keys and values or of rows, and place in it; the first of all for one below 0."""
    slots, slots_per_page = slots.clamp(min=0), pages.shape[1]
    return slots // slots_per_page, slots % slots_per_page


def feature_rows(memory: torch.Tensor, width: int) -> torch.Tensor:
    """View contiguous pages ``[num_pages, 2, slots_per_page, head_dim]`` as rows of ``width`` features,
    ``[num_pages, rows_per_page, width]``."""
    num_pages, _, slots_per_page, head_dim = memory.shape
    page_elements = 2 * slots_per_page * head_dim
    return memory.as_strided((num_pages, page_elements // width, width), (page_elements, width, 1))


@Operator
def add_features(hidden: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Add to each row of ``hidden``, which is contiguous, the row of features in its slot, without converting to
    float32."""
    kept = (slots >= 0).nonzero().flatten()
    hidden.index_add_(0, kept, rows[page_places(slots[kept], rows)])


@Operator
def write_features(values: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write ``values[i]`` to row slot ``slots[i]``. No slot may be named twice."""
    kept = slots >= 0
    rows[page_places(slots[kept], rows)] = values[kept]


@Operator
def read_features(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows of features in ``slots``, ``[num_rows, width]`` in the type of ``rows``; −1 reads as zeros."""
    kept = slots >= 0
    out = rows.new_zeros(slots.shape[0], rows.shape[2])
    out[kept] = rows[page_places(slots[kept], rows)]
    return out
