"""Random numbers as a function of (seed, forward pass, position, token id).

No generator has a state, so a request draws the same numbers at any batch, tile or rank count, and a vocabulary shard
draws just its own. The function is SplitMix64's finalizer (Steele, Lea, Flood 2014) chained over the four counters.
"""

import torch

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
NO_TOKEN = -1
"""Token id of draws that belong to a position rather than to a token."""


def signed_seed(seed: int) -> int:
    """A seed of up to 64 bits as the int64 of the same bits."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    # int64 shifts keep the sign; the mask makes the shift logical.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * signed_seed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed_seed(_MIX_2)
    return x ^ _shift_right(x, 31)


def uniform(
    seeds: torch.Tensor, forwards: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Uniform numbers in the open interval (0, 1), float64, of the broadcast shape of the four int64 counters."""
    key = seeds
    for counter in (forwards, positions, token_ids):
        key = _mix(key + (counter + 2) * signed_seed(_GOLDEN_GAMMA))
    # 52 bits: with 53, the half would round the largest one up to 1.
    return (_shift_right(key, 12).to(torch.float64) + 0.5) * 2.0**-52


def gumbel(
    seeds: torch.Tensor, forwards: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Standard Gumbel noise, float64: at lower precision its tail is cut off and sampling is biased to the mode."""
    return -torch.log(-torch.log(uniform(seeds, forwards, positions, token_ids)))
