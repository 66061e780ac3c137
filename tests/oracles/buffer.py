"""A model over one buffer of keys and values for the whole canvas, as slow, plain PyTorch.

Most cache methods are a choice of the rows that a forward pass computes and of the rows that it reads: what is computed
overwrites its place in the buffer, everything else is read as it was left.
"""

import math
from collections.abc import Sequence

import torch

from tests.oracles.models import PlainModel


class Buffer:
    """Keys (rotated) and values ``[layer, position, KV head, element]``; NaN where nothing was computed yet."""

    def __init__(self, model: PlainModel, canvas_length: int) -> None:
        self.model, self.length = model, canvas_length
        head_size = len(model.layers[0].weights["q"]) // model.heads
        shape = (len(model.layers), canvas_length, model.kv_heads, head_size)
        self.k, self.v = torch.full(shape, math.nan), torch.full(shape, math.nan)

    def forward(
        self, canvas: list[int], rows: Sequence[int], read: Sequence[Sequence[int]] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Computes ``rows``, which read the positions ``read`` of each layer (None: all). Logits, queries by layer."""
        rows = list(rows)
        x, queries = self.model.embed(canvas)[rows], []
        for number, layer in enumerate(self.model.layers):
            q, self.k[number, rows], self.v[number, rows] = self.model.qkv(layer, x, rows)
            seen = list(range(self.length) if read is None else read[number])
            x = x + self.model.attention(layer, q, self.k[number, seen], self.v[number, seen])
            x = x + self.model.mlp(layer, x)
            queries.append(q)
        return self.logits(x, rows), queries

    def logits(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Raw logits ``[canvas, vocabulary]``, NaN where there is no row."""
        logits = torch.full((self.length, len(self.model.head)), math.nan)
        logits[list(rows)] = self.model.predict(x)
        return logits
