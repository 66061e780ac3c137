"""What is checked of a checkpoint's tensors."""

import torch


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinite values."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # In one pass and without a copy: NaN is the least and the greatest of numbers with a NaN. PyTorch compares no
    # numbers of eight bits.
    ends = torch.stack(torch.aminmax(tensor.half() if tensor.itemsize == 1 else tensor))
    return bool(torch.isfinite(ends).all())
