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
        self.model = model
        self.length = canvas_length
        shape = (len(model.layers), canvas_length, model.kv_heads, len(model.layers[0].q) // model.heads)
        self.k, self.v = torch.full(shape, math.nan), torch.full(shape, math.nan)

    def embed(self, canvas: list[int], rows: Sequence[int]) -> torch.Tensor:
        return self.model.embedding[torch.tensor(canvas)[list(rows)]]

    def qkv(self, number: int, x: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Queries, keys (both rotated) and values of hidden states ``x`` at the positions ``rows``."""
        model, layer = self.model, self.model.layers[number]
        y = model._rms(x, layer.attn_norm)

        def heads(weight: torch.Tensor, bias: torch.Tensor | None, count: int) -> torch.Tensor:
            out = y @ weight.T
            return (out if bias is None else out + bias).view(len(rows), count, -1)

        q, k = heads(layer.q, layer.q_bias, model.heads), heads(layer.k, layer.k_bias, model.kv_heads)
        return self._rotate(q, rows), self._rotate(k, rows), heads(layer.v, layer.v_bias, model.kv_heads)

    def write(self, number: int, rows: Sequence[int], k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[number, list(rows)], self.v[number, list(rows)] = k, v

    def attend(
        self, number: int, x: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The hidden states after layer ``number``, whose queries ``q`` attend to all of ``keys``."""
        model, layer = self.model, self.model.layers[number]
        outs = []
        for h in range(model.heads):
            g = h * model.kv_heads // model.heads
            scores = q[:, h] @ keys[:, g].T / math.sqrt(q.shape[-1])
            outs.append(scores.softmax(-1) @ values[:, g])
        x = x + torch.cat(outs, dim=-1) @ layer.out.T
        y = model._rms(x, layer.mlp_norm)
        gate = y @ layer.gate.T
        return x + (gate * torch.sigmoid(gate) * (y @ layer.up.T)) @ layer.down.T

    def logits(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Raw logits ``[canvas, vocabulary]``, NaN where there is no row."""
        logits = torch.full((self.length, len(self.model.head)), math.nan)
        logits[list(rows)] = self.model._rms(x, self.model.norm) @ self.model.head.T
        return logits

    def forward(
        self, canvas: list[int], rows: Sequence[int], read: Sequence[Sequence[int]] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Computes ``rows``, which read the positions ``read`` of each layer (None: all). Logits, queries by layer."""
        x, queries = self.embed(canvas, rows), []
        for number in range(len(self.model.layers)):
            q, k, v = self.qkv(number, x, rows)
            self.write(number, rows, k, v)
            seen = list(range(self.length) if read is None else read[number])
            x = self.attend(number, x, q, self.k[number, seen], self.v[number, seen])
            queries.append(q)
        return self.logits(x, rows), queries

    def _rotate(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """RoPE at the rows' true positions: element i turns together with element i + d/2."""
        half = x.shape[-1] // 2
        speed = self.model.config["rope_theta"] ** (-2 * torch.arange(half, dtype=torch.float64) / (2 * half))
        angle = torch.tensor(list(rows), dtype=torch.float64)[:, None] * speed
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
