"""What a rule of parallel unmasking is: how many positions a step fills is read off their confidences."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dllm_engine.model_executor.unmasking.policy import Measure


@dataclass(frozen=True)
class ParallelUnmasking:
    """Chooses positions by their confidence and one value of the request's."""

    name: str
    measures: Measure
    """What the confidences it is given must be."""
    select: Callable[[torch.Tensor, float], torch.Tensor]
    """(confidence ``[num_candidates]``, value) -> indices of the chosen, int64, in any order."""
    else_counted: bool = False
    """Whether policies that measure something else keep to their fixed count, instead of being refused."""
