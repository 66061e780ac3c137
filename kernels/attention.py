r"""Bidirectional attention over sequences of different lengths laid end to end, and the
libraries that compute it.

For sequence s with rows R_s: out_i = Σ_{j ∈ R_s} softmax_j(q_i · k_j / √d) v_j, for
every i ∈ R_s; no mask inside a sequence, and no attention across sequences. With fewer
KV heads than query heads, each KV head serves a group of consecutive query heads.

The libraries are PyTorch's own attention and vLLM's FlashAttention.
"""

import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.logger import init_logger

from dllm_engine.kernels.paged_attention import PagedFlash, PagedTokens

logger = init_logger(f"vllm.{__name__}")

DenseAttention = Callable[[Tensor, Tensor, Tensor, list[int], Tensor], Tensor]
"""Computes what ``bidirectional_attention`` promises; arguments and result as there,
with at least one row.
"""


def attend_with_sdpa(
    q: Tensor, k: Tensor, v: Tensor, bounds: list[int], cu_seqlens: Tensor
) -> Tensor:
    """PyTorch's attention, with one call per run of neighbouring sequences of equal
    length.
    """
    out = torch.empty_like(q)
    start = 0
    for length, run in itertools.groupby(
        last - first for first, last in itertools.pairwise(bounds)
    ):
        count = len(list(run))
        rows = slice(start, start + count * length)
        start = rows.stop
        if length:
            queries, keys, values = (
                x[rows].unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v)
            )
            attended = F.scaled_dot_product_attention(
                queries, keys, values, enable_gqa=True
            )
            out[rows] = attended.transpose(1, 2).flatten(0, 1)
    return out


_attend: DenseAttention = attend_with_sdpa


def use_dense_backend(attend: DenseAttention) -> None:
    """Let ``attend`` compute ``bidirectional_attention`` in this process. The default
    is PyTorch's attention.
    """
    global _attend
    _attend = attend


def reads_bounds_on_device() -> bool:
    """Return True if the library in use reads bounds on the device. On the host it then
    needs only upper bounds of the lengths.
    """
    return _attend is not attend_with_sdpa


def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: list[int], cu_seqlens: Tensor
) -> Tensor:
    """Attend within each sequence, from ``q`` ``[num_rows, num_heads, head_dim]`` to
    ``k`` and ``v`` ``[num_rows, num_kv_heads, head_dim]``; the result is like ``q``.

    PyTorch's attention takes one call per run of sequences of equal length, so callers
    that sort a batch by length pay for each length once.

    Args:
        bounds: first row of each sequence and, last, ``num_rows``.
        cu_seqlens: the same on the device, int32.
    """
    if not q.shape[0]:
        return torch.empty_like(q)
    return _attend(q, k, v, bounds, cu_seqlens)


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> DenseAttention:
    """The attention of the library ``name``. ``"auto"``: FlashAttention's if it is
    available, else PyTorch's.

    Raises ``ValueError`` if the named library is not available.
    """
    if name == "sdpa":
        logger.info("Dense attention: sdpa")
        return attend_with_sdpa
    try:
        flash, _ = find_flash(device, dtype, head_dim)
    except ValueError as error:
        if name != "auto":
            raise ValueError(
                f"dense_attention={name!r} {error}; leave it at 'auto'"
            ) from error
        if device.type != "cpu":  # a CPU has no other library
            logger.info("Dense attention: sdpa, because flash %s", error)
        return attend_with_sdpa
    logger.info("Dense attention: flash")

    def attend(
        q: Tensor, k: Tensor, v: Tensor, bounds: list[int], cu_seqlens: Tensor
    ) -> Tensor:
        max_seqlen = max(stop - start for start, stop in itertools.pairwise(bounds))
        return flash(
            q,
            k,
            v,
            max_seqlen_q=max_seqlen,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_k=max_seqlen,
            cu_seqlens_k=cu_seqlens,
        )

    return attend


def find_flash(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[Callable[..., Tensor], int]:
    """The FlashAttention that vLLM chooses for this GPU, and its version. Raises
    ``ValueError`` if there is none.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"needs a CUDA device and float16 or bfloat16, here {device.type} and "
            f"{dtype}"
        )
    if head_dim % 8 or head_dim > 256:
        raise ValueError(
            f"needs heads of a multiple of 8 and at most 256 numbers, here {head_dim}"
        )
    from vllm.v1.attention.backends import fa_utils

    version = fa_utils.get_flash_attn_version(head_size=head_dim)
    if version is None:
        raise ValueError(
            "needs a GPU that vLLM's FlashAttention is built for (compute capability "
            "8.0 or later)"
        )
    return partial(
        fa_utils.flash_attn_varlen_func, causal=False, fa_version=version
    ), version


def choose_paged_flash(
    device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int
) -> PagedFlash | None:
    """FlashAttention over pages of ``page_size`` tokens; None if it is not available."""
    try:
        flash, version = find_flash(device, dtype, head_dim)
        if version not in (2, 3):
            raise ValueError(
                f"needs FlashAttention 2 or 3, and vLLM takes {version} for this GPU"
            )
        if page_size % 16:
            raise ValueError(f"needs a page_size of a multiple of 16, here {page_size}")
        if version == 3 and page_size >= 64:
            # From a page that its tile of keys divides (64 keys or more), it reads
            # whole tiles, and multiplies by 0 the values behind the tokens, which may
            # be NaN. From smaller pages it reads only the tokens.
            raise ValueError(f"needs a page_size below 64, here {page_size}")
    except ValueError as error:
        if device.type != "cpu":
            logger.info("Attention to pages: own kernel, because flash %s", error)
        return None
    logger.info(
        "Attention to pages: flash %d where it applies, else own kernel", version
    )

    def attend(
        q: Tensor, cu_seqlens: Tensor, tokens: PagedTokens, max_seqlen: int
    ) -> Tensor:
        num_kv_heads = tokens.head_len.shape[1]
        k_cache, v_cache = (
            x.unflatten(1, (-1, num_kv_heads)) for x in (tokens.k_pages, tokens.v_pages)
        )
        # As many keys as fit the tables: a captured launch then stays correct, whatever
        # the tables hold.
        rows = {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": max_seqlen}
        keys = {
            "seqused_k": tokens.token_lens,
            "max_seqlen_k": tokens.page_tables.shape[1] * k_cache.shape[1],
        }
        return flash(
            q, k_cache, v_cache, **rows, **keys, block_table=tokens.page_tables
        )

    return attend
