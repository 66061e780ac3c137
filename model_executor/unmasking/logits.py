"""Logits of which each tensor-parallel rank has a shard: numbers added to them, and their log-probabilities."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from vllm.distributed.parallel_state import GroupCoordinator

from dllm_engine.kernels.token_statistics import token_statistics
from dllm_engine.model_executor.models.decoder import VocabularyShard
from dllm_engine.model_executor.transfer import gather_from_ranks, gather_shards, on_device
from dllm_engine.model_executor.unmasking.statistics import TokenLogprobs
from dllm_engine.scheduler.request import TokenBias


class BiasedRows(NamedTuple):
    """Numbers for the logits of some tokens in some rows."""

    rows: torch.Tensor
    """bool ``[num_rows]``"""
    bias: TokenBias


def with_biases(shard: VocabularyShard, biased: Sequence[BiasedRows], chunk: slice) -> VocabularyShard:
    """A shard of the logits of a chunk of the rows, with the numbers added as far as their tokens are in it; float32
    where there are any."""
    if not biased:
        return shard
    logits, first_token = shard[0].to(torch.float32, copy=True), shard[1]
    for rows, bias in biased:
        tokens, numbers = bias.columns
        inside = (tokens >= first_token) & (tokens < first_token + logits.shape[1])
        columns = on_device(tokens[inside] - first_token, logits.device)
        added = on_device(numbers[inside], logits.device, torch.float32)
        logits[:, columns] += torch.where(rows[chunk, None], added, 0.0)
    return VocabularyShard(logits, first_token)


def token_logprobs(
    shard: VocabularyShard,
    tokens: torch.Tensor,
    num_logprobs: int,
    tp_group: GroupCoordinator,
    log_total: torch.Tensor | None = None,
) -> TokenLogprobs:
    """Log-probabilities of a given token per row and of the ``num_logprobs`` likeliest, on every rank.

    ``tokens``: int64 ``[num_rows]``. ``log_total``: the log of the sum of exponentials of each row's logits on all
    ranks, float32 ``[num_rows]``, where it is known.
    """
    (logits, first_token), sharded = shard, tp_group.world_size > 1
    if log_total is None:
        log_total = token_statistics(logits, -1, False, False)[2]
        log_total = gather_from_ranks(log_total, tp_group).logsumexp(dim=0) if sharded else log_total
    columns, size = tokens - first_token, logits.shape[-1]
    token_logit = logits.gather(-1, columns.clamp(0, size - 1)[:, None])[:, 0]
    if sharded:  # the token is in one rank's shard
        elsewhere = (columns < 0) | (columns >= size)
        token_logit = gather_from_ranks(token_logit.masked_fill(elsewhere, -torch.inf), tp_group).amax(dim=0)
    top, top_tokens = logits.topk(min(num_logprobs, size), dim=-1)
    top_tokens = top_tokens + first_token
    larger = (logits > token_logit[:, None]).sum(dim=-1)
    if sharded:
        top_tokens, top = (gather_shards(x, tp_group) for x in (top_tokens, top))
        top, kept = top.topk(min(num_logprobs, top.shape[-1]), dim=-1)
        top_tokens = top_tokens.gather(-1, kept)
        larger = gather_from_ranks(larger, tp_group).sum(dim=0)
    return TokenLogprobs(
        token=token_logit.float() - log_total,
        rank=larger + 1,
        top_tokens=top_tokens,
        top=top.float() - log_total[:, None],
    )
