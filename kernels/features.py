r"""Rows of features, as wide as the model's hidden states, in pages of the memory that holds keys and values.

A page of E = 2 · slots_per_page · head_dim elements holds ⌊E / width⌋ whole rows, one after the other, and leaves the
rest unused. Row slot σ lies in page σ // rows_per_page at place σ % rows_per_page:

    add_features:    hidden_i += rows_σ(i)
    write_features:  rows_σ(i) := values_i
    read_features:   result_i = rows_σ(i)

for every i with σ(i) ≥ 0; −1 stands for no row. Rows that no slot names are never used in arithmetic: they may hold
NaN. Arguments of all three: ``rows`` ``[num_pages, rows_per_page, width]``, as ``feature_rows`` gives them; ``slots``
int64 ``[num_rows]``; ``hidden`` and ``values`` ``[num_rows, width]``.
"""

import torch

from dllm_engine.kernels._operator import operator


def feature_rows(memory: torch.Tensor, width: int) -> torch.Tensor:
    """View contiguous pages ``[num_pages, 2, slots_per_page, head_dim]`` as rows of ``width`` features,
    ``[num_pages, rows_per_page, width]``."""
    num_pages, _, slots_per_page, head_dim = memory.shape
    page_elements = 2 * slots_per_page * head_dim
    return memory.as_strided((num_pages, page_elements // width, width), (page_elements, width, 1))


@operator("features:add_features")
def add_features(hidden: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Add to each row of ``hidden``, which is contiguous, the row of features in its slot, without converting to
    float32."""
    kept = (slots >= 0).nonzero().flatten()
    hidden.index_add_(0, kept, rows[_places(rows, slots[kept])])


@operator("features:write_features")
def write_features(values: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write ``values[i]`` to row slot ``slots[i]``. No slot may be named twice."""
    kept = slots >= 0
    rows[_places(rows, slots[kept])] = values[kept]


@operator("features:read_features")
def read_features(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows of features in ``slots``, ``[num_rows, width]`` in the type of ``rows``; −1 reads as zeros."""
    kept = slots >= 0
    out = rows.new_zeros(slots.shape[0], rows.shape[2])
    out[kept] = rows[_places(rows, slots[kept])]
    return out


def _places(rows: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(page, place in it) of slots that exist."""
    return slots // rows.shape[1], slots % rows.shape[1]
