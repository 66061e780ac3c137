"""Copies between the host and the device, and between tensor-parallel ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import GroupCoordinator


def on_device(
    values: Sequence[Any] | np.ndarray,
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Copy numbers from the host to the device without waiting for the device. On a CPU
    the tensor shares the memory of ``values`` if they are an array of the same type."""
    host_values = torch.as_tensor(values, dtype=dtype)
    # A GPU copies asynchronously only from pinned memory.
    return (
        host_values
        if device.type == "cpu"
        else host_values.pin_memory().to(device, non_blocking=True)
    )


def on_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Copy tensors from the device to the host. The host waits for the device once, for
    any number of tensors. On a CPU the array of a single tensor shares its memory."""
    if len(tensors) < 2:
        return [tensor.cpu().numpy() for tensor in tensors]
    parts = [tensor.flatten().view(torch.uint8) for tensor in tensors]
    arrays = np.split(
        torch.cat(parts).cpu().numpy(),
        np.cumsum([part.shape[0] for part in parts])[:-1],
    )
    types = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    return [
        a.view(name).reshape(t.shape)
        for a, name, t in zip(arrays, types, tensors, strict=True)
    ]


def gather_from_ranks(values: Tensor, tp_group: GroupCoordinator) -> Tensor:
    """Gather ``values`` of every rank, of any type but of one shape, in rank order:
    ``[num_ranks, *values.shape]``.
    """
    if tp_group.world_size == 1:
        return values[None]
    values = values.contiguous()
    received = [torch.empty_like(values) for _ in range(tp_group.world_size)]
    torch.distributed.all_gather(received, values, group=tp_group.device_group)
    return torch.stack(received)


def gather_shards(values: Tensor, tp_group: GroupCoordinator) -> Tensor:
    """Concatenate ``values`` of every rank in the last dimension, whose size may
    differ, as for shards of a vocabulary. With several ranks this waits for the device.
    """
    if tp_group.world_size == 1:
        return values
    own_size = torch.tensor([values.shape[-1]], device=values.device)
    sizes = gather_from_ranks(own_size, tp_group)[:, 0].tolist()
    padded = torch.nn.functional.pad(values, (0, max(sizes) - values.shape[-1]))
    parts = zip(gather_from_ranks(padded, tp_group), sizes, strict=True)
    return torch.cat([part[..., :size] for part, size in parts], dim=-1)
