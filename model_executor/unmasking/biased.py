"""Rows of logits to which requests add numbers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dllm_engine.model_executor.models.decoder import VocabularyShard
from dllm_engine.model_executor.transfer import on_device


class BiasedRows(NamedTuple):
    """Numbers for the logits of some tokens in some rows."""

    rows: torch.Tensor
    """bool ``[num_rows]``"""
    tokens: np.ndarray
    """int64 ``[num_tokens]``, each once."""
    numbers: np.ndarray
    """float32 ``[num_tokens]``; −∞ takes a token out."""


def with_biases(shard: VocabularyShard, biased: Sequence[BiasedRows], chunk: slice) -> VocabularyShard:
    """A shard of the logits of a chunk of the rows, with the numbers added as far as their tokens are in it; float32
    where there are any."""
    if not biased:
        return shard
    logits, first_token = shard[0].to(torch.float32, copy=True), shard[1]
    for request_bias in biased:
        inside = (request_bias.tokens >= first_token) & (request_bias.tokens < first_token + logits.shape[1])
        columns = on_device(request_bias.tokens[inside] - first_token, logits.device)
        numbers = on_device(request_bias.numbers[inside], logits.device, torch.float32)
        logits[:, columns] += torch.where(request_bias.rows[chunk, None], numbers, 0.0)
    return VocabularyShard(logits, first_token)
