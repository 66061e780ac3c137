"""The network of both demo models: LLaDA's architecture, with bidirectional or causal layers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .samples import VOCAB_SIZE


@dataclass(frozen=True)
class ModelSettings:
    """Shape of a model; names as in LLaDA's config.json."""

    n_layers: int
    d_model: int = 128
    n_heads: int = 4
    mlp_hidden_size: int = 384
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


class RMSNorm(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(settings.d_model))
        self.eps = settings.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Block(nn.Module):
    """One LLaDA layer: bidirectional attention with RoPE, then a gated MLP, both pre-normalised."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        d, hidden = settings.d_model, settings.mlp_hidden_size
        self.n_heads = settings.n_heads
        self.attn_norm = RMSNorm(settings)
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d, bias=False)
        self.attn_out = nn.Linear(d, d, bias=False)
        self.ff_norm = RMSNorm(settings)
        self.ff_proj = nn.Linear(d, hidden, bias=False)
        self.up_proj = nn.Linear(d, hidden, bias=False)
        self.ff_out = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, first_row: int = 0) -> Tensor:
        """Map ``x`` [batch, length, d_model] to the new rows from ``first_row`` on; keys and values use all rows."""
        normed = self.attn_norm(x)
        x, queries_from = x[:, first_row:], normed[:, first_row:]
        q = rotate(self._heads(self.q_proj(queries_from)), cos[first_row:], sin[first_row:])
        k = rotate(self._heads(self.k_proj(normed)), cos, sin)
        visible = self._visible(normed.shape[1], first_row)
        attended = F.scaled_dot_product_attention(q, k, self._heads(self.v_proj(normed)), attn_mask=visible)
        x = x + self.attn_out(attended.transpose(1, 2).flatten(2))
        normed = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(normed)) * self.up_proj(normed))

    def _visible(self, length: int, first_row: int) -> Tensor | None:
        """Which keys each row from ``first_row`` on sees, bool [length - first_row, length]; None: all."""
        return None

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] -> [batch, heads, length, head_dim]."""
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)


class CausalBlock(Block):
    """A layer whose rows see only themselves and the rows before."""

    def _visible(self, length: int, first_row: int) -> Tensor:
        return torch.ones(length - first_row, length, dtype=torch.bool).tril(first_row)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply half-split RoPE to ``x`` [batch, heads, length, head_dim]; ``cos`` and ``sin`` [length, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DemoModel(nn.Module):
    """LLaDA's architecture. Attribute names give the published tensor names after ``model.transformer.``."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.wte = nn.Embedding(VOCAB_SIZE, settings.d_model)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.n_layers))
        self.ln_f = RMSNorm(settings)
        self.ff_out = nn.Linear(settings.d_model, VOCAB_SIZE, bias=False)

    def forward(self, canvas: Tensor, first_row: int = 0) -> Tensor:
        """Final normalised hidden states [batch, length - first_row, d_model] of the rows from ``first_row`` on.

        The last layer is computed for these rows only: nobody needs predictions inside the prompt.
        """
        angles = torch.arange(canvas.shape[1], dtype=torch.float32)[:, None] * rope_frequencies(self.settings)
        cos, sin = angles.cos(), angles.sin()
        x = self.wte(canvas)
        for block in self.blocks[:-1]:
            x = block(x, cos, sin)
        return self.ln_f(self.blocks[-1](x, cos, sin, first_row))

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


class Guide(DemoModel):
    """The same with causal layers: Llama under LLaDA's attribute names."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        # They replace layers that were drawn before; the shipped weights depend on this order of random numbers.
        self.blocks = nn.ModuleList(CausalBlock(settings) for _ in range(settings.n_layers))


def rope_frequencies(settings: ModelSettings) -> Tensor:
    """Angle per position of each pair of dimensions, float32 [head_dim / 2]."""
    half = settings.head_dim // 2
    return settings.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
