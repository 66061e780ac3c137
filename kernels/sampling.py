r"""Sampling of tokens, with random numbers that are a function of (seed, forward pass,
position, token id).

There is no generator state. So a request draws the same numbers with any batch, tile
size and number of ranks, and a vocabulary shard draws only its own numbers. The
function is SplitMix64's finalizer (Steele, Lea, Flood 2014) chained over the four
counters.

With u_j the number of token j, the token

    argmax_j (l_j / T + g_j),   g_j = −log(−log u_j)

is a draw from softmax(l / T): the Gumbel-max trick. The argmax of exp(l_j) / (−log
u_j)^T is the same token.

Before the draw, top-p and top-k may leave out all but the likeliest tokens.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dllm_engine.kernels._operator import Operator

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
NO_TOKEN = -1
"""Token id of draws that belong to a position rather than to a token."""
_NUMBERS_AT_ONCE = 1 << 22
"""Numbers that the CPU kernel draws at once: 32 MiB for each step of the hash."""


class Counters(NamedTuple):
    """Counters of each row's random numbers, int64 ``[num_rows]`` each."""

    seeds: Tensor
    forwards: Tensor
    positions: Tensor


def signed_seed(seed: int) -> int:
    """The int64 with the same bits as a seed of up to 64 bits."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # int64 shifts keep the sign; the mask makes the shift logical.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * signed_seed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed_seed(_MIX_2)
    return x ^ _shift_right(x, 31)


def uniform(
    seeds: Tensor, forwards: Tensor, positions: Tensor, token_ids: Tensor
) -> Tensor:
    """Uniform numbers in the open interval (0, 1), float64, of the broadcast shape of
    the four int64 counters.
    """
    key = seeds
    for counter in (forwards, positions, token_ids):
        key = _mix(key + (counter + 2) * signed_seed(_GOLDEN_GAMMA))
    # 52 bits: with 53, the half would round the largest one up to 1.
    return (_shift_right(key, 12).to(torch.float64) + 0.5) * 2.0**-52


def gumbel_of(numbers: Tensor) -> Tensor:
    """Standard Gumbel noise from uniform numbers, float64: at lower precision its tail
    is cut off, and sampling is biased towards the mode."""
    return -torch.log(-torch.log(numbers))


def noisy_logits(
    logits: Tensor, counters: Counters, first_token: int, temperature: float
) -> Iterator[tuple[slice, Tensor]]:
    """Noisy logits of ``gumbel_max``, float64, for some rows at a time, with the
    indices of these rows.
    """
    token_ids = torch.arange(
        first_token, first_token + logits.shape[1], device=logits.device
    )
    num_rows = max(1, _NUMBERS_AT_ONCE // logits.shape[1])
    for start in range(0, logits.shape[0], num_rows):
        rows = slice(start, start + num_rows)
        seeds, forwards, positions = (counter[rows, None] for counter in counters)
        yield (
            rows,
            gumbel_of(uniform(seeds, forwards, positions, token_ids)).add_(
                logits[rows].float() / temperature
            ),
        )


@Operator
def gumbel_max(
    logits: Tensor,
    counters: Counters,
    first_token: int,
    temperature: float,
    forbidden_token: int,
) -> tuple[Tensor, Tensor]:
    """Draw a token for each row from the softmax of its logits at a temperature.
    Returns the score that won, float64 ``[num_rows]``, and its column, int64
    ``[num_rows]``. The best score of all shards is the draw from the whole vocabulary.

    Args:
        logits: logits of a shard of the vocabulary, ``[num_rows, vocab_size]``,
            float32, float16 or bfloat16. They are divided by the temperature in
            float32; the noise is added in float64.
        first_token: token id of the shard's first column.
        temperature: above 0.
        forbidden_token: column that is never drawn, such as the mask's; −1 for none.
    """
    column = torch.empty_like(counters.seeds)
    best = torch.empty_like(column, dtype=torch.float64)
    for rows, scores in noisy_logits(logits, counters, first_token, temperature):
        if forbidden_token >= 0:
            scores[:, forbidden_token] = -torch.inf
        best[rows], column[rows] = scores.max(dim=-1)
    return best, column


@Operator
def filtered_logits(
    logits: Tensor, temperature: float, top_p: float, top_k: int, forbidden_token: int
) -> Tensor:
    """Logits at a temperature, float32 ``[num_rows, vocab_size]``: the lowest finite
    number where top-p, then top-k, leaves a token out (in this order). The result is
    undefined for rows with NaN or +∞, and for rows of only −∞.

    Top-p takes tokens by descending probability, and equally probable tokens by
    ascending id, while the tokens before sum to at most ``top_p``: the token that
    crosses it is taken. Top-k takes all tokens that are at least as likely as the k-th.
    If only the forbidden token would be left, the likeliest other token is taken too.

    Kernels round the sums of top-p differently. They may disagree about a token only if
    the sum of the tokens before it is within 1e-5 of ``top_p``.

    Args:
        logits: ``[num_rows, vocab_size]``, float32, float16 or bfloat16.
        temperature: above 0; logits are divided by it in float32.
        top_p: above 0; 1 or more leaves nothing out.
        top_k: 0 leaves nothing out.
        forbidden_token: column that is never drawn, such as the mask's, although its
            probability counts; −1 for none.
    """
    logits = unfiltered = logits.float() / temperature
    lowest = torch.finfo(logits.dtype).min
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) > top_p
        # The token that crosses the threshold is kept: shift the decision by one.
        remove = torch.nn.functional.pad(before[:, :-1], (1, 0), value=False)
        logits = logits.masked_fill(remove.scatter(-1, order, remove), lowest)
    if top_k > 0:
        largest = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values
        logits = logits.masked_fill(logits < largest[:, -1:], lowest)
    if logits is unfiltered:
        return logits
    others = unfiltered.clone()
    if forbidden_token >= 0:
        others[:, forbidden_token] = -torch.inf
    best = others.argmax(dim=-1, keepdim=True)
    return logits.scatter(-1, best, unfiltered.gather(-1, best))
