"""Questions about a canvas that no step of a request has."""

from typing import NamedTuple


class Probe(NamedTuple):
    """A canvas, and what is asked about it: the log-probability of each of ``tokens``
    at the masked position beside it. A position may have several tokens.
    """

    canvas: list[int]
    masked: list[int]
    tokens: list[int]


class Logprobs(NamedTuple):
    """Log-probabilities of the tokens of a probe, and of the likeliest tokens at their
    positions.
    """

    asked: list[float]
    likeliest: list[float]
