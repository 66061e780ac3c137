r"""Rows of features, as wide as the model's hidden states, in pages of the memory that holds keys and values.

A page of E = 2 · slots_per_page · head_dim elements holds ⌊E / width⌋ whole rows, one after the other, and leaves the
rest unused. Row slot σ lies in page σ // rows_per_page at place σ % rows_per_page:

    add_features:    hidden_i += rows_σ(i)
    write_features:  rows_σ(i) := values_i
    read_features:   result_i = rows_σ(i)

for every i with σ(i) ≥ 0; −1 stands for no row. Rows that no slot names are never used in arithmetic: they may hold
NaN.
"""

import torch

from dllm_engine.kernels._operator import operator


def feature_rows(memory: torch.Tensor, width: int, num_kv_heads: int = 1) -> torch.Tensor:
    """View the pages as rows of features.

    Args:
        memory: contiguous, ``[num_pages, 2, slots_per_page, head_dim]``.
        width: elements of a row.
        num_kv_heads: slots per token; only for the error message, which names a ``page_size``.

    Returns:
        A view of the memory, ``[num_pages, rows_per_page, width]``.

    Raises:
        ValueError: memory of another layout, or pages smaller than a row.
    """
    if memory.dim() != 4 or memory.shape[1] != 2 or not memory.is_contiguous():
        raise ValueError(
            f"memory {list(memory.shape)}, {memory.stride()} in strides, is not contiguous "
            "[num_pages, 2, slots_per_page, head_dim]"
        )
    if width < 1:
        raise ValueError(f"width={width} is not a positive number of elements")
    num_pages, _, slots_per_page, head_dim = memory.shape
    page_elements = 2 * slots_per_page * head_dim
    rows_per_page = page_elements // width
    if not rows_per_page:
        smallest = -(-width // (2 * num_kv_heads * head_dim))
        raise ValueError(
            f"a page of page_size={slots_per_page // num_kv_heads} holds {page_elements} elements and a row of "
            f"features has {width}: page_size={smallest} at least is needed"
        )
    return memory.as_strided((num_pages, rows_per_page, width), (page_elements, width, 1))


@operator("features:add_features")
def add_features(hidden: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Add to each row of ``hidden`` the row of features in its slot, without converting to float32.

    Args:
        hidden: ``[num_rows, width]``, each row contiguous.
        rows: ``[num_pages, rows_per_page, width]``, as ``feature_rows`` gives them.
        slots: int64 ``[num_rows]``; −1 leaves the row as it is.

    Raises:
        ValueError: shapes, strides or types that do not belong together.
    """
    kept = (slots >= 0).nonzero().flatten()
    hidden.index_add_(0, kept, rows[_places(rows, slots[kept])])


@add_features.register_check
def _(hidden: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    _check_values("hidden", hidden, rows, slots)
    if hidden.stride(1) != 1:
        raise ValueError(f"a row of hidden is not contiguous: {hidden.stride()} in strides")


@operator("features:write_features")
def write_features(values: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write ``values[i]`` to row slot ``slots[i]``.

    Args:
        values: ``[num_rows, width]``.
        rows: ``[num_pages, rows_per_page, width]``, as ``feature_rows`` gives them.
        slots: int64 ``[num_rows]``; −1 writes nothing. No slot may be named twice.

    Raises:
        ValueError: shapes, strides or types that do not belong together.
    """
    kept = slots >= 0
    if not kept.all():
        values, slots = values[kept], slots[kept]
    rows[_places(rows, slots)] = values


@write_features.register_check
def _(values: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    _check_values("values", values, rows, slots)


@operator("features:read_features")
def read_features(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows of features in ``slots``.

    Args:
        rows: ``[num_pages, rows_per_page, width]``, as ``feature_rows`` gives them.
        slots: int64 ``[num_rows]``; −1 reads as zeros.

    Returns:
        ``[num_rows, width]``, in the type of ``rows``.

    Raises:
        ValueError: shapes or strides that do not belong together.
    """
    kept = slots >= 0
    if kept.all():
        return rows[_places(rows, slots)]
    out = rows.new_zeros(slots.shape[0], rows.shape[2])
    out[kept] = rows[_places(rows, slots[kept])]
    return out


@read_features.register_check
def _check_rows(rows: torch.Tensor, slots: torch.Tensor) -> None:
    if rows.dim() != 3 or not rows.shape[1] or not rows.shape[2] or slots.dim() != 1:
        raise ValueError(f"rows {list(rows.shape)} and slots {list(slots.shape)} do not belong together")
    if rows.stride()[1:] != (rows.shape[2], 1):
        raise ValueError(f"the rows of a page do not follow each other: {rows.stride()} in strides")


def _places(rows: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(page, place in it) of slots that exist."""
    return slots // rows.shape[1], slots % rows.shape[1]


def _check_values(name: str, values: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    _check_rows(rows, slots)
    if values.shape != (slots.shape[0], rows.shape[2]) or values.dtype != rows.dtype:
        raise ValueError(
            f"{name} {list(values.shape)} {values.dtype}, rows {list(rows.shape)} {rows.dtype}, "
            f"slots {list(slots.shape)} do not belong together"
        )
