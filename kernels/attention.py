r"""Bidirectional attention over sequences of different lengths laid end to end.

For sequence s with rows R_s:  out_i = Σ_{j ∈ R_s} softmax_j(q_i · k_j / √d) v_j,  for every i ∈ R_s; no mask inside a
sequence, nothing across sequences. With fewer KV heads than query heads each serves a group of consecutive ones.
"""

import itertools

import torch
import torch.nn.functional as F

from dllm_engine.kernels._operator import operator
from dllm_engine.kernels.xformers_attention import attend_with_xformers

_backend = "sdpa"


def use_dense_backend(name: str) -> None:
    """Choose the library that computes ``bidirectional_attention`` in this process: ``sdpa`` or ``xformers``."""
    global _backend
    _backend = name


@operator("bidirectional_attention")
def bidirectional_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: list[int]) -> torch.Tensor:
    """Attend within each sequence.

    Args:
        q: ``[num_rows, num_heads, head_dim]``.
        k, v: ``[num_rows, num_kv_heads, head_dim]``.
        cu_seqlens: first row of each sequence and, last, ``num_rows``.

    Returns:
        ``[num_rows, num_heads, head_dim]``. PyTorch's attention takes one call per run of sequences of equal length,
        so callers that sort a batch by length pay for each length once.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if _backend == "xformers":
        return attend_with_xformers(q, k, v, cu_seqlens)
    out = torch.empty_like(q)
    # PyTorch's fast CPU kernel has no grouped-query form; expanding the keys costs less than its slow path.
    group = q.shape[1] // k.shape[1]
    if group > 1 and not q.is_cuda:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    for start, length, count in _equal_runs(cu_seqlens):
        rows = slice(start, start + length * count)

        def per_sequence(x: torch.Tensor, rows: slice = rows, count: int = count) -> torch.Tensor:
            return x[rows].unflatten(0, (count, -1)).transpose(1, 2)

        keys, values = per_sequence(k), per_sequence(v)
        if not q.is_cuda:
            # The kernel reads a head's keys once per few queries, which pays for a copy that lays them side by side.
            keys, values = keys.contiguous(), values.contiguous()
        attended = F.scaled_dot_product_attention(per_sequence(q), keys, values, enable_gqa=group > 1 and q.is_cuda)
        out[rows] = attended.transpose(1, 2).flatten(0, 1)
    return out


@bidirectional_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: list[int]) -> torch.Tensor:
    return torch.empty_like(q)


@bidirectional_attention.register_check
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: list[int]) -> None:
    if q.dim() != 3 or k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not belong together")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads")
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != q.shape[0] or sorted(cu_seqlens) != cu_seqlens:
        raise ValueError(f"cu_seqlens={cu_seqlens} does not divide {q.shape[0]} rows")


def _equal_runs(cu_seqlens: list[int]) -> list[tuple[int, int, int]]:
    """(first row, length, number of sequences) of each run of neighbouring sequences of equal length."""
    runs = []
    start = 0
    for length, group in itertools.groupby(stop - start for start, stop in itertools.pairwise(cu_seqlens)):
        count = len(list(group))
        if length:
            runs.append((start, length, count))
        start += length * count
    return runs
