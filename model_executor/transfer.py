"""From the host to the device."""

from collections.abc import Sequence
from typing import Any

import torch


def on_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Numbers of the host as a tensor, without waiting for what the device is doing."""
    # Only from pinned memory does a GPU fetch them by itself.
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
