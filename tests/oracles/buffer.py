"""A model over one buffer of keys and values for the whole canvas, as slow, plain
PyTorch.

Most cache methods are a choice of the rows that a forward pass computes and of the rows
that it reads: what is computed overwrites its place in the buffer, everything else is
read as it was left.
"""

import math
from collections.abc import Sequence

import torch

from tests.oracles.decoding import Decoding


class Buffer:
    """Keys (rotated) and values ``[layer, position, KV head, element]``; NaN where
    nothing was computed yet.
    """

    def __init__(self, run: Decoding) -> None:
        self.run, self.model = run, run.model
        head_size = len(self.model.layers[0].weights["q"]) // self.model.heads
        shape = (len(self.model.layers), run.length, self.model.kv_heads, head_size)
        self.k, self.v = torch.full(shape, math.nan), torch.full(shape, math.nan)
        self.queries: list[torch.Tensor] = []
        """Of the last pass, by layer."""
        self.rows: list[int] = []
        """Of the last pass."""

    @classmethod
    def of(cls, run: Decoding) -> "Buffer":
        """The buffer of a run; it shares prompts if the run does."""
        return cls(run) if run.shared is None else run.shared.buffer(run)

    def forward(self, rows: Sequence[int], *read: Sequence[int]) -> torch.Tensor:
        """Logits of ``rows``. They read the positions ``read``, of each layer where
        several lists are given.
        """
        rows, self.queries = list(rows), []
        self.rows = rows
        x = self.model.embed(self.run.canvas)[rows]
        for number, layer in enumerate(self.model.layers):
            q, self.k[number, rows], self.v[number, rows] = self.model.qkv(
                layer, x, rows
            )
            seen = list(read[number] if len(read) > 1 else read[0])
            x = x + self.model.attention(
                layer, q, self.k[number, seen], self.v[number, seen]
            )
            x = x + self.model.mlp(layer, x)
            self.queries.append(q)
        return self.logits(x, rows)

    def store(self, first: int, end: int) -> torch.Tensor:
        """Compute whole blocks that attention goes by, each of which sees itself and
        those before it; logits of the last.
        """
        run, logits = self.run, torch.empty(0)
        while first < end:
            length = run.block_length - (first + run.lead) % run.block_length
            logits = self.forward(range(first, first + length), range(first + length))
            first += length
        return logits

    def logits(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Raw logits ``[canvas, vocabulary]``, NaN where there is no row."""
        logits = torch.full((self.run.length, len(self.model.head)), math.nan)
        logits[list(rows)] = self.model.predict(x)
        return logits
