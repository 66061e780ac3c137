r"""The certainty prior (d2Cache, arXiv 2509.23094): how much is known near a position of the response.

With m_j = 1 where token j of a response of G is known and 0 where it is masked, m_j = 1 for the G positions before it
and m_j = m_{G-1} for the G positions behind it:

    D_p = Σ_{j=-G}^{2G-1} m_j exp(-(p - j)² / 2σ²)  /  Σ_{d=-3G}^{3G-1} exp(-d² / 2σ²)
"""

import math
from functools import lru_cache

import numpy as np

_REACH = 9
"""Farther than so many σ a token weighs less than float64 tells."""


def certainty_density(known: np.ndarray, sigma: float) -> np.ndarray:
    """D of every position, float64 ``[gen_length]``, from ``known``, bool ``[gen_length]``."""
    size = len(known)
    weights = _weights(size, sigma)
    around = np.concatenate((np.ones(size), known, np.full(size, known[-1])))
    return np.convolve(np.pad(around, len(weights) // 2), weights, mode="valid")[size : 2 * size]


@lru_cache(maxsize=64)
def _weights(size: int, sigma: float) -> np.ndarray:
    """Weights of all distances within a response of ``size``; an odd number of them."""
    distances = np.arange(-3 * size, 3 * size)
    gaussian = np.exp(-(distances**2) / (2 * sigma**2))
    reach = min(2 * size - 1, math.ceil(_REACH * sigma))
    return gaussian[3 * size - reach : 3 * size + reach + 1] / gaussian.sum()
