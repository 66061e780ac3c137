"""What an unmasking policy is: an order of the masked positions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Measure = Literal["probability", "entropy", "margin"]
"""What a confidence is: the predicted token's probability, the negative entropy, or p1 − p2."""


@dataclass
class TokenLogprobs:
    """Log-probabilities of the plain softmax of the logits, at temperature 1 and unfiltered; one entry per row."""

    token: torch.Tensor
    """``[num_rows]`` float32: of the predicted token."""
    rank: torch.Tensor
    """``[num_rows]`` int64: 1 + the number of tokens with a larger logit."""
    top_tokens: torch.Tensor
    """``[num_rows, num_logprobs]`` int64: the likeliest tokens, the first one first."""
    top: torch.Tensor
    """``[num_rows, num_logprobs]`` float32: theirs."""

    def split(self, sizes: list[int]) -> list["TokenLogprobs"]:
        """Of so many rows each."""
        return [TokenLogprobs(*parts) for parts in zip(*(x.split(sizes) for x in vars(self).values()), strict=True)]


@dataclass
class TokenStatistics:
    """The predicted token of each row, and how sure the model is of it; one entry per row."""

    token: torch.Tensor
    """``[num_rows]`` int64."""
    probability: torch.Tensor
    """``[num_rows]`` float32: of the predicted token."""
    negative_entropy: torch.Tensor | None
    """``[num_rows]`` float32: Σ p log(p + 1e-10); None where no policy of the batch asks."""
    margin: torch.Tensor | None
    """``[num_rows]`` float32: p1 - p2 of the two likeliest tokens; None where no policy of the batch asks."""
    noise: torch.Tensor | None
    """``[num_rows]`` float64 uniform in (0, 1), a draw per position; None where no policy of the batch asks."""
    logprobs: TokenLogprobs | None = None
    """None where no request of the batch asks."""
    held_back: torch.Tensor | None = None
    """``[num_rows]`` bool: end tokens that come too early to be unmasked; None where every request allows them."""

    def split(self, sizes: list[int]) -> list["TokenStatistics"]:
        """Of so many rows each."""
        columns = [[None] * len(sizes) if x is None else x.split(sizes) for x in vars(self).values()]
        return [TokenStatistics(*parts) for parts in zip(*columns, strict=True)]


@dataclass(frozen=True)
class UnmaskingPolicy:
    """Gives each masked position a confidence; a step unmasks the most confident ones."""

    name: str
    confidence: Callable[[TokenStatistics], torch.Tensor]
    tempered: bool = False
    """Whether probabilities are those after temperature, top-p and top-k (Dream) or of the plain softmax (LLaDA)."""
    measures: Measure | None = None
    """What the confidence is, where a rule of parallel unmasking could use it; None: chance."""
    needs_entropy: bool = False
    needs_margin: bool = False
    needs_noise: bool = False
    draws_each_position: bool = False
    """Unmask each position with the step's ratio as probability, not a fixed count of the most confident."""


def required(values: torch.Tensor | None) -> torch.Tensor:
    """A statistic that the policy declared it needs."""
    assert values is not None
    return values
