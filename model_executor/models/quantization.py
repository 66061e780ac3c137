"""What quantized checkpoints need beside vLLM's quantization methods."""

import torch


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a checkpoint's tensor holds neither NaN nor infinite values."""
    if not tensor.is_floating_point():
        return True
    # PyTorch has no `isfinite` for eight bits.
    return bool(torch.isfinite(tensor.half() if tensor.itemsize == 1 else tensor).all())


def is_group_index(parameter_name: str) -> bool:
    """Whether a parameter says which group of weights each input feature belongs to (GPTQ)."""
    return "g_idx" in parameter_name.rpartition(".")[2]


def is_plain_group_index(parameter_name: str, tensor: torch.Tensor) -> bool:
    """Whether groups follow each other, as vLLM's kernels have them."""
    return is_group_index(parameter_name) and bool((tensor.diff() >= 0).all())
