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
    slots, slots_per_page = slots.clamp(min=0), pages.shape[1]
    pages[slots // slots_per_page, slots % slots_per_page] = values


@write_slots.register_check
def _(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    if values.dim() != 3 or pages.dim() != 3 or values.shape[2] != pages.shape[2] or slots.shape != values.shape[:2]:
        raise ValueError(
            f"values {list(values.shape)}, pages {list(pages.shape)}, slots {list(slots.shape)} do not belong together"
        )
