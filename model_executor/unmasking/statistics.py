"""Predictions of a step: tokens, the model's confidence in them, and the certainty
prior.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from dllm_engine.decoding.unmasking_policies import Measure

LEAST_CONFIDENT = -1e30
"""Confidence below any negative entropy. A position with it may still be unmasked."""
_REACH = 9
"""Distance in σ beyond which a weight is too small for float64."""


class _Rows:
    """Base class of columns with equally many rows."""

    def split(self, sizes: list[int]) -> list[Self]:
        """Split into parts of ``sizes`` rows."""
        columns = [
            [None] * len(sizes) if x is None else x.split(sizes)
            for x in vars(self).values()
        ]
        return [type(self)(*parts) for parts in zip(*columns, strict=True)]

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts. A column that is None in one part is None in all."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        joined: Iterator[Any] = (
            None
            if x[0] is None
            else x[0].concatenated(x)
            if isinstance(x[0], _Rows)
            else torch.cat(x)
            for x in columns
        )
        return cls(*joined)


@dataclass
class TokenLogprobs(_Rows):
    """Log-probabilities of the plain softmax of the logits (temperature 1, no filters),
    one entry per row.
    """

    token: Tensor
    """``[num_rows]`` float32: of the predicted token."""
    rank: Tensor
    """``[num_rows]`` int64: 1 + the number of tokens with a larger logit."""
    top_tokens: Tensor
    """``[num_rows, num_logprobs]`` int64: the likeliest tokens, in order."""
    top: Tensor
    """``[num_rows, num_logprobs]`` float32: log-probabilities of ``top_tokens``."""

    @classmethod
    def empty(cls, tokens: Tensor, num_logprobs: int) -> "TokenLogprobs":
        """Statistics to be filled in. A row without a prediction keeps its token of
        ``tokens`` ``[num_rows]``, with probability 1.
        """
        top_tokens = tokens[:, None].repeat(1, num_logprobs)
        return cls(
            token=torch.zeros_like(tokens, dtype=torch.float32),
            rank=torch.ones_like(tokens),
            top_tokens=top_tokens,
            top=torch.zeros_like(top_tokens, dtype=torch.float32),
        )


@dataclass
class TokenStatistics(_Rows):
    """The predicted token of each row, and the model's confidence in it; one entry per
    row.
    """

    token: Tensor
    """``[num_rows]`` int64."""
    probability: Tensor
    """``[num_rows]`` float32: of the predicted token."""
    negative_entropy: Tensor | None
    """``[num_rows]`` float32: Σ p log(p + 1e-10); None if no policy of the batch needs
    it.
    """
    margin: Tensor | None
    """``[num_rows]`` float32: p1 - p2 of the two likeliest tokens; None if no policy of
    the batch needs it.
    """
    noise: Tensor | None
    """``[num_rows]`` float64 uniform in (0, 1), a draw per position; None if no policy
    of the batch needs it.
    """
    logprobs: TokenLogprobs | None = None
    """None if no request of the batch reports them."""
    held_back: Tensor | None = None
    """``[num_rows]`` bool: end tokens that must not be unmasked yet; None if every
    request allows them.
    """
    written: Tensor | None = None
    """``[num_rows]`` bool: finished rows whose position was masked or gets another
    token; None before it is known.
    """

    def put_last(self, rows: Tensor) -> None:
        """Make these rows, bool ``[num_rows]``, less confident than all others. The
        probability of their tokens must be 0 already.
        """
        if self.negative_entropy is not None:
            self.negative_entropy = self.negative_entropy.masked_fill(
                rows, LEAST_CONFIDENT
            )
        if self.margin is not None:
            self.margin = self.margin.masked_fill(rows, -1.0)

    def confidence(self, measure: Measure, offsets: Tensor | None = None) -> Tensor:
        """Values by which an unmasking policy orders the rows, ``[num_rows]``.
        ``offsets`` ``[num_rows]``: numbers that ascend with the position, for the
        policy that orders by position."""
        if measure == "position":
            return -required(offsets).float()
        by_measure = {
            "probability": self.probability,
            "entropy": self.negative_entropy,
            "margin": self.margin,
        }
        return required(self.noise if measure == "noise" else by_measure[measure])


def required(values: Tensor | None) -> Tensor:
    """Return a statistic that must be there, because a policy of the batch needs it."""
    assert values is not None
    return values


def certainty_density(known: np.ndarray, sigma: float) -> np.ndarray:
    r"""The certainty prior (d2Cache, arXiv 2509.23094): density of known tokens near
    each position of a response of G tokens, float64 ``[gen_length]``.

    With m_j = 1 where token j is ``known`` (bool ``[gen_length]``) and 0 where it is
    masked, m_j = 1 for the G positions before the response and m_j = m_{G-1} for the G
    positions behind it:

        D_p = Σ_{j=-G}^{2G-1} m_j exp(-(p - j)² / 2σ²)  /  Σ_{d=-3G}^{3G-1} exp(-d² /
        2σ²)
    """
    size = len(known)
    weights = _weights(size, sigma)
    around = np.concatenate((np.ones(size), known, np.full(size, known[-1])))
    return np.convolve(np.pad(around, len(weights) // 2), weights, mode="valid")[
        size : 2 * size
    ]


@lru_cache(maxsize=64)
def _weights(size: int, sigma: float) -> np.ndarray:
    """Weights of all distances within a response of ``size`` tokens. Their number is
    odd.
    """
    distances = np.arange(-3 * size, 3 * size)
    gaussian = np.exp(-(distances**2) / (2 * sigma**2))
    reach = min(2 * size - 1, math.ceil(_REACH * sigma))
    middle = 3 * size
    return gaussian[middle - reach : middle + reach + 1] / gaussian.sum()
