"""From the host to the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def on_device(
    values: Sequence[Any] | np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copy numbers from the host to a tensor on the device, without waiting for the device.

    On a CPU the tensor shares the memory of ``values`` where these are an array of that type.
    """
    of_host = torch.as_tensor(values, dtype=dtype)
    # Only from pinned memory does a GPU fetch them by itself.
    return of_host if device.type == "cpu" else of_host.pin_memory().to(device, non_blocking=True)
