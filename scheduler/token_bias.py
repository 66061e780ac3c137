"""Numbers that are added to logits before anything is computed from them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class TokenBias:
    """A number for each of some tokens, added to their logits at the canvas positions before ``stop``."""

    stop: int
    values: tuple[tuple[int, float], ...]
    """Token and number, of each token once. −∞: the token is not chosen."""

    @classmethod
    def barring(cls, tokens: Iterable[int], stop: int) -> "TokenBias":
        """Tokens that are not chosen before ``stop``."""
        return cls(stop, tuple((token, -math.inf) for token in sorted(tokens)))

    @cached_property
    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens, int64, and their numbers, float32; ``[num_tokens]`` each."""
        tokens, numbers = zip(*self.values, strict=True) if self.values else ((), ())
        return np.array(tokens, dtype=np.int64), np.array(numbers, dtype=np.float32)
