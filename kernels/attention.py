r"""Bidirectional attention over sequences of different lengths laid end to end.

For sequence s with rows R_s:  out_i = Σ_{j ∈ R_s} softmax_j(q_i · k_j / √d) v_j,  for every i ∈ R_s; no mask inside a
sequence, nothing across sequences. With fewer KV heads than query heads each serves a group of consecutive ones.
"""

import torch

from dllm_engine.kernels.dense_backends import DenseAttention, attend_with_sdpa

_attend: DenseAttention = attend_with_sdpa


def use_dense_backend(attend: DenseAttention) -> None:
    """Let ``attend`` compute ``bidirectional_attention`` in this process; at first it is PyTorch's."""
    global _attend
    _attend = attend


def reads_bounds_on_device() -> bool:
    """Return True if the library in use needs no more of ``bounds`` than upper bounds of the lengths."""
    return _attend is not attend_with_sdpa


def bidirectional_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Attend within each sequence.

    Args:
        q: ``[num_rows, num_heads, head_dim]``.
        k, v: ``[num_rows, num_kv_heads, head_dim]``.
        bounds: first row of each sequence and, last, ``num_rows``.
        cu_seqlens: the same on the device, int32.

    Returns:
        ``[num_rows, num_heads, head_dim]``. PyTorch's attention takes one call per run of sequences of equal length,
        so callers that sort a batch by length pay for each length once.
    """
    if not q.shape[0]:
        return torch.empty_like(q)
    return _attend(q, k, v, bounds, cu_seqlens)
