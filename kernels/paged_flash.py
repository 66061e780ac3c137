"""Attention to tokens in pages by FlashAttention, as vLLM brings it.

It reads pages sooner than the Triton kernel of ``paged_attention``, which takes what FlashAttention does not: rows
beside the pages, rows with limits, and heads that have tokens of their own.
"""

import torch
from vllm.logger import init_logger

from dllm_engine.kernels.dense_backends import flash_version
from dllm_engine.kernels.paged_attention import PagedFlash
from dllm_engine.kernels.paged_tokens import PagedTokens

logger = init_logger(f"vllm.{__name__}")


def choose_paged_flash(device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int) -> PagedFlash | None:
    """FlashAttention over pages of ``page_size`` tokens; None where it cannot be had."""
    try:
        version = flash_version(device, dtype, head_dim)
        if version not in (2, 3):
            raise ValueError(f"needs FlashAttention 2 or 3, and vLLM takes {version} for this GPU")
        if page_size % 16:
            raise ValueError(f"needs a page_size of a multiple of 16, here {page_size}")
    except ValueError as error:
        logger.info("Attention to pages: own kernel, because flash %s", error)
        return None
    logger.info("Attention to pages: flash %d where it applies, else own kernel", version)
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    def attend(q: torch.Tensor, cu_seqlens: torch.Tensor, tokens: PagedTokens, max_seqlen: int) -> torch.Tensor:
        num_kv_heads = tokens.head_len.shape[1]
        k_cache, v_cache = (x.unflatten(1, (-1, num_kv_heads)) for x in (tokens.k_pages, tokens.v_pages))
        out: torch.Tensor = flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            max_seqlen_q=max_seqlen,
            cu_seqlens_q=cu_seqlens,
            # The most that fit the tables: a captured launch stays correct for all that they may hold.
            max_seqlen_k=tokens.page_tables.shape[1] * k_cache.shape[1],
            seqused_k=tokens.token_lens,
            block_table=tokens.page_tables,
            causal=False,
            fa_version=version,
        )
        return out

    return attend
