"""Probes: log-probabilities of tokens in a canvas that is not a step of a request."""

from typing import NamedTuple


class Probe(NamedTuple):
    """A canvas, and the tokens whose log-probabilities are wanted: of each of
    ``tokens`` at the position in ``masked`` with the same index. A position may have
    several tokens.
    """

    canvas: list[int]
    masked: list[int]
    tokens: list[int]


class Logprobs(NamedTuple):
    """Log-probabilities of the tokens of a probe, and of the likeliest tokens at their
    positions.
    """

    tokens: list[float]
    likeliest: list[float]
