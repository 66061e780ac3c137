"""The pass of a step that neither reads nor writes pages."""

import torch

from dllm_engine.kernels.attention import bidirectional_attention
from dllm_engine.model_executor.passes.base import LayerPass


class DensePass(LayerPass):
    """Each sequence attends to all of itself."""

    def __init__(self, cu_seqlens: list[int]) -> None:
        """``cu_seqlens``: first row of each sequence and, last, the number of rows."""
        self.cu_seqlens = cu_seqlens

    @property
    def repeats(self) -> bool:
        return True

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return bidirectional_attention(q, k, v, self.cu_seqlens)
