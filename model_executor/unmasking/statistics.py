"""Predictions of a step: tokens, the model's confidence in them, and a prior of it."""

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
"""Less than any negative entropy, and yet one that may be unmasked."""
_REACH = 9
"""Farther than so many σ a token weighs less than float64 tells."""


class _Rows:
    """Columns of equally many rows."""

    def split(self, sizes: list[int]) -> list[Self]:
        """Split into parts of ``sizes`` rows."""
        columns = [
            [None] * len(sizes) if x is None else x.split(sizes)
            for x in vars(self).values()
        ]
        return [type(self)(*parts) for parts in zip(*columns, strict=True)]

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts; what is None in one is None in all."""
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
    """Log-probabilities of the plain softmax of the logits, at temperature 1 and
    unfiltered; one entry per row.
    """

    token: Tensor
    """``[num_rows]`` float32: of the predicted token."""
    rank: Tensor
    """``[num_rows]`` int64: 1 + the number of tokens with a larger logit."""
    top_tokens: Tensor
    """``[num_rows, num_logprobs]`` int64: the likeliest tokens, the first one first."""
    top: Tensor
    """``[num_rows, num_logprobs]`` float32: theirs."""

    @classmethod
    def empty(cls, tokens: Tensor, num_logprobs: int) -> "TokenLogprobs":
        """Statistics to be filled in. A row that nothing is predicted for keeps its
        token of ``tokens`` ``[num_rows]``, which is certain.
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
    """The predicted token of each row, and how sure the model is of it; one entry per
    row.
    """

    token: Tensor
    """``[num_rows]`` int64."""
    probability: Tensor
    """``[num_rows]`` float32: of the predicted token."""
    negative_entropy: Tensor | None
    """``[num_rows]`` float32: Σ p log(p + 1e-10); None where no policy of the batch
    asks.
    """
    margin: Tensor | None
    """``[num_rows]`` float32: p1 - p2 of the two likeliest tokens; None where no policy
    of the batch asks.
    """
    noise: Tensor | None
    """``[num_rows]`` float64 uniform in (0, 1), a draw per position; None where no
    policy of the batch asks.
    """
    logprobs: TokenLogprobs | None = None
    """None where no request of the batch asks."""
    held_back: Tensor | None = None
    """``[num_rows]`` bool: end tokens that come too early to be unmasked; None where
    every request allows them.
    """
    written: Tensor | None = None
    """``[num_rows]`` bool: finished rows whose positions were masked or get another
    token; None before it is known.
    """

    def put_last(self, rows: Tensor) -> None:
        """Make rows, bool ``[num_rows]``, less confident than any other. Their tokens
        have no probability already.
        """
        if self.negative_entropy is not None:
            self.negative_entropy = self.negative_entropy.masked_fill(
                rows, LEAST_CONFIDENT
            )
        if self.margin is not None:
            self.margin = self.margin.masked_fill(rows, -1.0)

    def confidence(self, measure: Measure, offsets: Tensor | None = None) -> Tensor:
        """``[num_rows]``: by which an unmasking policy orders the rows. ``offsets``
        ``[num_rows]``: numbers that ascend with the position, for a policy that goes by
        it."""
        if measure == "position":
            return -required(offsets).float()
        by_measure = {
            "probability": self.probability,
            "entropy": self.negative_entropy,
            "margin": self.margin,
        }
        return required(self.noise if measure == "noise" else by_measure[measure])


def required(values: Tensor | None) -> Tensor:
    """A statistic that a policy of the batch asked for."""
    assert values is not None
    return values


def certainty_density(known: np.ndarray, sigma: float) -> np.ndarray:
    r"""The certainty prior (d2Cache, arXiv 2509.23094): how much is known near each
    position of a response of G tokens, float64 ``[gen_length]``.

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
    """Weights of all distances within a response of ``size``; an odd number of them."""
    distances = np.arange(-3 * size, 3 * size)
    gaussian = np.exp(-(distances**2) / (2 * sigma**2))
    reach = min(2 * size - 1, math.ceil(_REACH * sigma))
    middle = 3 * size
    return gaussian[middle - reach : middle + reach + 1] / gaussian.sum()
