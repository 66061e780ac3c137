r"""Log-likelihood of a continuation under a masked diffusion model.

The model has no factorisation from left to right. Papers use a lower bound (arXiv
2502.09992, equation 6 and Algorithm 3) of the log-likelihood of a continuation r of L
tokens after a prompt p:

E over l uniform in 1 … L and a uniform choice M of l positions of L/l · Σ_{i ∈ M} log
p(r_i | p, r without M)

It is a sum over all 2^L − 1 choices of positions, each with the weight 1 / (l · C(L,
l)). It is computed exactly if this takes no more forward passes than sampling, and is
estimated by Monte Carlo otherwise.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dllm_engine.decoding.probe import Probe
from dllm_engine.families import ModelFamily

NUM_SAMPLES = 128
"""Samples per continuation, as in that paper."""
Canvas = tuple[list[int], list[int]]
"""Tokens, and positions to mask."""


def probe_of(canvas: Canvas) -> Probe:
    """The probe of a canvas: it asks for the probabilities of the canvas's own tokens
    at the masked positions.
    """
    tokens, masked = canvas
    return Probe(tokens, masked, [tokens[position] for position in masked])


def no_likelihoods(family: ModelFamily) -> str | None:
    """Reason why probabilities of given tokens cannot be computed for a model; None:
    they can.
    """
    if family.has_one_pass:
        return None
    return (
        f"likelihoods of {family.name} are not supported: what its tokens attend to, or "
        f"are predicted by, depends on where the prompt ends; generate text instead, or "
        f"use a model of another family"
    )


def log_likelihoods(
    llm: Any,
    pairs: Sequence[tuple[list[int], list[int]]],
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
) -> list[float]:
    """Log-likelihood bounds, in nats, of (prompt tokens, continuation tokens) pairs.
    The result of a pair does not depend on the others. Continuations of equal length
    after the same prompt, such as the choices of a question, share their masks. No
    cache is used. ``llm`` must have the method ``masked_logprobs`` of ``LLM``."""
    if num_samples < 1:
        raise ValueError(
            f"num_samples={num_samples} is out of range: it must be at least 1"
        )
    terms, ahead = itertools.tee(weighted_canvases(pairs, num_samples, seed))
    totals = [0.0] * len(pairs)
    computed = llm.masked_logprobs(canvas for _, _, canvas in ahead)
    for (index, weight, _), logprobs in zip(terms, computed, strict=True):
        totals[index] += weight * sum(logprobs)
    return totals


def weighted_canvases(
    pairs: Iterable[tuple[list[int], list[int]]], num_samples: int, seed: int
) -> Iterator[tuple[int, float, Canvas]]:
    """Yield (index of the pair, weight, canvas). The bound of a pair is the weighted
    sum of its canvases' log-probabilities.
    """
    for index, (prompt, continuation) in enumerate(pairs):
        rng = np.random.default_rng([seed, len(continuation), *prompt])
        for weight, masked in weighted_masks(len(continuation), num_samples, rng):
            positions = [len(prompt) + position for position in masked]
            yield index, weight, (prompt + continuation, positions)


def weighted_masks(
    length: int, num_samples: int, rng: np.random.Generator
) -> Iterator[tuple[float, list[int]]]:
    """Yield (weight, masked positions): all masks if there are at most ``num_samples``,
    which give the exact bound; else ``num_samples`` masks, which estimate it, with
    numbers of masked tokens spread evenly over 1 … ``length`` (systematic sampling)."""
    if 2**length - 1 <= num_samples:
        for count in range(1, length + 1):
            for masked in itertools.combinations(range(length), count):
                yield 1 / (count * math.comb(length, count)), list(masked)
        return
    offset = rng.random()
    for sample in range(num_samples):
        count = min(1 + int(length * (sample + offset) / num_samples), length)
        drawn = rng.choice(length, count, replace=False)
        yield length / count / num_samples, np.sort(drawn).tolist()
