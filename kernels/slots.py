"""Writing to slots of pages: the key and value of one KV head of one token each."""

import torch

from dllm_engine.kernels._operator import operator


@operator("slots:write_kv")
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
    """Page and offset of each slot; the first of all for one below 0."""
    slots, slots_per_page = slots.clamp(min=0), pages.shape[1]
    return slots // slots_per_page, slots % slots_per_page
