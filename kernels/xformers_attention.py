"""Dense attention by xformers, where it is installed: one call for sequences of any lengths.

PyTorch's own attention needs one call per run of sequences of equal length; xformers' takes them end to end, with a
block-diagonal mask that it never materialises.
"""

import itertools

import torch


def check_xformers(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` saying what is missing where xformers cannot serve a model of ``dtype`` on ``device``."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"dense_attention='xformers' needs a CUDA device and float16 or bfloat16, here {device.type} and {dtype}; "
            f"leave it at 'sdpa'"
        )
    try:
        import xformers.ops  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"dense_attention='xformers': xformers cannot be imported ({error}); install it, or leave it at 'sdpa'"
        ) from error


def attend_with_xformers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: list[int]) -> torch.Tensor:
    """``bidirectional_attention`` by xformers; arguments and result as there."""
    from xformers.ops import memory_efficient_attention
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask

    lengths = [stop - start for start, stop in itertools.pairwise(cu_seqlens) if stop > start]
    if not lengths:
        return torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    grouped_q = q.unflatten(1, (k.shape[1], group))[None]
    # Query heads of a group share one key head: a stride of 0, no copy.
    grouped_k, grouped_v = (x[None, :, :, None].expand(-1, -1, -1, group, -1) for x in (k, v))
    bias = BlockDiagonalMask.from_seqlens(lengths, device=q.device)
    return memory_efficient_attention(grouped_q, grouped_k, grouped_v, attn_bias=bias)[0].flatten(1, 2)
