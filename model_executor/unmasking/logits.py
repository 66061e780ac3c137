"""Operations on logits of which each tensor-parallel rank has a shard: biases of
requests, the best token of each class for constrained responses, and log-probabilities.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import GroupCoordinator

from dllm_engine.constraints.constraint import Constraint
from dllm_engine.decoding.spec import TokenBias
from dllm_engine.kernels.token_statistics import token_statistics
from dllm_engine.model_executor.models.decoder import VocabularyShard
from dllm_engine.model_executor.transfer import (
    gather_from_ranks,
    gather_shards,
    on_device,
)
from dllm_engine.model_executor.unmasking.statistics import TokenLogprobs


class BiasedRows(NamedTuple):
    """Bias for the logits of some tokens in some rows."""

    rows: Tensor
    """bool ``[num_rows]``"""
    bias: TokenBias


def with_biases(
    shard: VocabularyShard, biased: Sequence[BiasedRows], chunk: slice
) -> VocabularyShard:
    """A shard of the logits of a chunk of rows, with the biases of those tokens that
    are in the shard; float32 if there are biases."""
    if not biased:
        return shard
    logits = shard[0].to(torch.float32, copy=True)
    first_token = shard[1]
    for rows, bias in biased:
        tokens, numbers = bias.columns
        inside = (tokens >= first_token) & (tokens < first_token + logits.shape[1])
        columns = on_device(tokens[inside] - first_token, logits.device)
        added = on_device(numbers[inside], logits.device, torch.float32)
        if bias.others:
            every = logits.new_full(logits.shape[1:], bias.others)
            every[columns] = added
            logits += torch.where(rows[chunk, None], every, 0.0)
        else:
            logits[:, columns] += torch.where(rows[chunk, None], added, 0.0)
    return VocabularyShard(logits, first_token)


@dataclass(frozen=True)
class ConstrainedRows:
    """Rows that predict positions of one constrained response."""

    rows: slice
    class_of: Tensor
    """int64 ``[vocab_size]``: the class of each token; ``num_classes`` for a token that
    must not be written.
    """
    num_classes: int
    choose: Callable[[np.ndarray], np.ndarray]
    """Maps the score of the best token of each class in each row, ``[num_rows,
    num_classes]``, to the class that each row writes, int64 ``[num_rows]``; −1 for a
    row that the constraint leaves open."""

    def within(self, chunk: slice) -> slice:
        """Rows within ``chunk``, counted from its first row."""
        return slice(
            max(self.rows.start - chunk.start, 0), max(self.rows.stop - chunk.start, 0)
        )


@lru_cache(maxsize=16)
def class_on_device(constraint: Constraint, device: torch.device) -> Tensor:
    """``ConstrainedRows.class_of`` of a constraint."""
    class_of = constraint.class_of.astype(np.int64)
    return on_device(np.where(class_of < 0, constraint.num_classes, class_of), device)


def class_maxima(scores: Tensor, class_of: Tensor, num_classes: int) -> Tensor:
    """The best score of each class in each row, ``[num_rows, num_classes]``; −∞ for a
    class without a token.

    ``scores``: ``[num_rows, num_tokens]``; ``class_of``: class of each token,
    ``[num_tokens]``.
    """
    maxima = scores.new_full((scores.shape[0], num_classes + 1), -torch.inf)
    return maxima.scatter_reduce_(1, class_of.expand_as(scores), scores, "amax")[:, :-1]


def best_of_class(
    scores: Tensor,
    class_of: Tensor,
    classes: Tensor,
    forbidden_token: int,
) -> tuple[Tensor, Tensor]:
    """The score and the column of the best token of each row's class, ``[num_rows]``
    each; the score is −∞ if the class has no token.

    ``scores`` and ``class_of``: as for ``class_maxima``. For class −1, the best of all
    tokens but ``forbidden_token``, which is a column, or −1 for none.
    """
    allowed = class_of == classes[:, None]
    is_open = classes < 0
    if is_open.any():
        allowed |= is_open[:, None]
        if forbidden_token >= 0:
            allowed[:, forbidden_token] = False
    score, column = torch.where(allowed, scores, -torch.inf).max(dim=-1)
    ruled_out = score == -torch.inf
    if ruled_out.any():
        # A token with probability 0 is better than a token that must not be written.
        column = torch.where(ruled_out, allowed.byte().argmax(dim=-1), column)
        score = torch.where(
            ruled_out & allowed.any(dim=-1), torch.finfo(score.dtype).min, score
        )
    return score, column


def log_totals(logits: Tensor, tp_group: GroupCoordinator) -> Tensor:
    """Log of the sum of exponentials of each row's logits on all ranks, float32
    ``[num_rows]``, from this rank's ``[num_rows, num_tokens]``.
    """
    _, _, shard_total, *_ = token_statistics(
        logits, -1, with_entropy=False, with_margin=False
    )
    return gather_from_ranks(shard_total, tp_group).logsumexp(dim=0)


def logits_at(
    shard: VocabularyShard,
    rows: Tensor,
    tokens: Tensor,
    tp_group: GroupCoordinator,
) -> Tensor:
    """Logits of tokens at rows, float32, on every rank. ``rows`` and ``tokens`` are
    broadcast to the shape of the result.
    """
    logits, first_token = shard
    columns = tokens - first_token
    size = logits.shape[-1]
    shard_logits = logits[rows, columns.clamp(0, size - 1)].float()
    if tp_group.world_size > 1:  # the token is in one rank's shard
        shard_logits = shard_logits.masked_fill(
            (columns < 0) | (columns >= size), -torch.inf
        )
    return gather_from_ranks(shard_logits, tp_group).amax(dim=0)


def token_logprobs(
    shard: VocabularyShard,
    tokens: Tensor,
    num_logprobs: int,
    tp_group: GroupCoordinator,
    log_total: Tensor | None = None,
) -> TokenLogprobs:
    """Log-probabilities of a given token per row, and of its ``num_logprobs`` likeliest
    tokens, on every rank.

    ``tokens``: int64 ``[num_rows]``. ``log_total``: the log of the sum of exponentials
    of each row's logits on all ranks, float32 ``[num_rows]``; None: it is computed.
    """
    (logits, first_token), sharded = shard, tp_group.world_size > 1
    if log_total is None:
        log_total = log_totals(logits, tp_group)
    columns = tokens - first_token
    size = logits.shape[-1]
    shard_columns = columns.clamp(0, size - 1)[:, None]
    token_logit = logits.gather(-1, shard_columns)[:, 0]
    if sharded:  # the token is in one rank's shard
        elsewhere = (columns < 0) | (columns >= size)
        token_logit = gather_from_ranks(
            token_logit.masked_fill(elsewhere, -torch.inf), tp_group
        ).amax(dim=0)
    top, top_tokens = logits.topk(min(num_logprobs, size), dim=-1)
    top_tokens = top_tokens + first_token
    larger = (logits > token_logit[:, None]).sum(dim=-1)
    if sharded:
        top_tokens, top = (gather_shards(x, tp_group) for x in (top_tokens, top))
        top, order = top.topk(min(num_logprobs, top.shape[-1]), dim=-1)
        top_tokens = top_tokens.gather(-1, order)
        larger = gather_from_ranks(larger, tp_group).sum(dim=0)
    return TokenLogprobs(
        token=token_logit.float() - log_total,
        rank=larger + 1,
        top_tokens=top_tokens,
        top=top.float() - log_total[:, None],
    )
