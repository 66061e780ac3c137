"""Layer passes: who runs the layers of a model over which rows.

A model's layers expose parts only. A layer pass owns the loop over them; it may drop rows between layers (early
skipping) or compute some parts for all rows and others for a few (adaptive updates).
"""

from collections.abc import Iterable
from typing import Protocol

import torch

from dllm_engine.kernels.attention import bidirectional_attention
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases


class LayerPass(Protocol):
    """Runs all layers in one forward pass."""

    def __call__(self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases) -> torch.Tensor:
        """Hidden states ``[num_rows, hidden_size]`` after the last layer, from the embeddings of the same rows."""


class DensePass:
    """Every row through every layer; each sequence attends to all of itself."""

    def __init__(self, cu_seqlens: list[int]) -> None:
        """``cu_seqlens``: first row of each sequence and, last, the number of rows."""
        self.cu_seqlens = cu_seqlens

    def __call__(self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases) -> torch.Tensor:
        for layer in layers:
            q, k, v = layer.qkv(layer.attn_norm(hidden))
            attended = bidirectional_attention(layer.rope(q, phases), layer.rope(k, phases), v, self.cu_seqlens)
            hidden = hidden + layer.o_proj(attended)
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
        return hidden
