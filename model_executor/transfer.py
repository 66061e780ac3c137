"""From the host to the device and back."""

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


def on_host(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Copy tensors of a device to arrays of the host. However many they are, the device is waited for once."""
    if not tensors:
        return []
    parts = [tensor.flatten().view(torch.uint8) for tensor in tensors]
    arrays = np.split(torch.cat(parts).cpu().numpy(), np.cumsum([part.shape[0] for part in parts])[:-1])
    types = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    return [a.view(name).reshape(t.shape) for a, name, t in zip(arrays, types, tensors, strict=True)]
