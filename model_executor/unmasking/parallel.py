"""What a rule of parallel unmasking is: how many positions a step fills is read off their confidences."""

from dataclasses import dataclass

from dllm_engine.model_executor.unmasking.policy import Measure
from dllm_engine.model_executor.unmasking.selection import Rule


@dataclass(frozen=True)
class ParallelUnmasking:
    """Chooses positions by their confidence and one value of the request's."""

    name: str
    measures: Measure
    """What the confidences it is given must be."""
    passes: Rule
    """Always passes the first."""
    else_counted: bool = False
    """Whether policies that measure something else keep to their fixed count, instead of being refused."""
