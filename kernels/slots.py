"""Writing to slots of pages: the key or value of one KV head of one token each."""

import torch

from dllm_engine.kernels._operator import operator


@operator("slots:write_slots")
def write_slots(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Write ``values[i, h]`` to physical slot ``slots[i, h]``.

    Args:
        values: ``[num_rows, num_kv_heads, head_dim]``.
        pages: ``[num_pages, slots_per_page, head_dim]``.
        slots: ``page · slots_per_page + offset``, int64 ``[num_rows, num_kv_heads]``. What is below 0 is not written,
            or to page 0, which is no request's. No other slot may be named twice.

    Raises:
        ValueError: shapes that do not belong together.
    """
    pages[_places(slots, pages)] = values


@write_slots.register_check
def _check(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    if values.dim() != 3 or pages.dim() != 3 or values.shape[2] != pages.shape[2] or slots.shape != values.shape[:2]:
        raise ValueError(
            f"values {list(values.shape)}, pages {list(pages.shape)}, slots {list(slots.shape)} do not belong together"
        )


@operator("slots:write_kv")
def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """``write_slots`` of keys and of values to the same slots, in one launch."""
    places = _places(slots, k_pages)
    k_pages[places], v_pages[places] = k, v


@write_kv.register_check
def _(k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor) -> None:
    for values, pages in ((k, k_pages), (v, v_pages)):
        _check(values, pages, slots)
    if k_pages.shape != v_pages.shape or k_pages.stride() != v_pages.stride():
        shapes = f"k_pages {list(k_pages.shape)} and v_pages {list(v_pages.shape)}"
        raise ValueError(f"{shapes}, {k_pages.stride()} and {v_pages.stride()} in strides, do not belong together")


def _places(slots: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and offset of each slot."""
    slots, slots_per_page = slots.clamp(min=0), pages.shape[1]
    return slots // slots_per_page, slots % slots_per_page
