"""The pass of a step that neither reads nor writes pages."""

import torch

from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import LayerPass, attend_alone
from dllm_engine.model_executor.step_batch import RowBounds, StepBatch


class DensePass(LayerPass):
    """Each sequence attends to itself, as far as its rows have no limits to all of it."""

    def __init__(self, row_bounds: RowBounds) -> None:
        """``row_bounds``: of the sequences."""
        self.row_bounds = row_bounds

    @property
    def repeats(self) -> bool:
        return True

    @property
    def writes(self) -> bool:
        return False

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend_alone(q, k, v, self.row_bounds)


def dense_pass(batch: StepBatch, pages: PageMemory | None) -> DensePass:
    """The pass of ``cache_method="none"``."""
    return DensePass(batch.row_bounds())
