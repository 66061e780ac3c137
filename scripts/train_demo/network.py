"""The network of the demo models: LLaDA's architecture, and what Llama and SDAR do
differently.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .samples import BLOCK_LENGTH, VOCAB_SIZE

D_MODEL, MLP_HIDDEN_SIZE = 128, 384
N_KV_HEADS, HEAD_DIM = 4, 32
ROPE_THETA = 500_000.0
NORM_EPS = 1e-5


@dataclass(frozen=True)
class ModelSettings:
    """In what the models differ; names as in LLaDA's config.json."""

    n_layers: int
    n_heads: int = N_KV_HEADS
    qk_norm: bool = False
    """A norm on each head of queries and keys, before RoPE."""


class Block(nn.Module):
    """One layer: attention with RoPE, then a gated MLP, both pre-normalised."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()

        def linear(width: int, out: int) -> nn.Linear:
            return nn.Linear(width, out, bias=False)

        query_width, kv_width = settings.n_heads * HEAD_DIM, N_KV_HEADS * HEAD_DIM
        self.attn_norm = nn.RMSNorm(D_MODEL, NORM_EPS)
        self.q_proj = linear(D_MODEL, query_width)
        self.k_proj = linear(D_MODEL, kv_width)
        self.v_proj = linear(D_MODEL, kv_width)
        self.attn_out = linear(query_width, D_MODEL)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if settings.qk_norm:
            self.q_norm = nn.RMSNorm(HEAD_DIM, NORM_EPS)
            self.k_norm = nn.RMSNorm(HEAD_DIM, NORM_EPS)
        self.ff_norm = nn.RMSNorm(D_MODEL, NORM_EPS)
        self.ff_proj = linear(D_MODEL, MLP_HIDDEN_SIZE)
        self.up_proj = linear(D_MODEL, MLP_HIDDEN_SIZE)
        self.ff_out = linear(MLP_HIDDEN_SIZE, D_MODEL)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        visible: Tensor | None,
        first_row: int = 0,
    ) -> Tensor:
        """Map ``x`` [batch, length, d_model] to the new rows from ``first_row`` on;
        keys and values use all rows.

        ``visible``, bool [length, length], says which keys each row sees; None: all.
        """
        normed = self.attn_norm(x)
        x, queries_from = x[:, first_row:], normed[:, first_row:]
        q = self.q_norm(heads_of(self.q_proj(queries_from)))
        k = self.k_norm(heads_of(self.k_proj(normed)))
        v = heads_of(self.v_proj(normed))
        q = rotate(q, cos[first_row:], sin[first_row:])
        k = rotate(k, cos, sin)
        group = q.shape[1] // N_KV_HEADS
        k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
        mask = None if visible is None else visible[first_row:]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.attn_out(attended.transpose(1, 2).flatten(2))
        normed = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(normed)) * self.up_proj(normed))


def heads_of(x: Tensor) -> Tensor:
    """[batch, length, heads * head_dim] -> [batch, heads, length, head_dim]."""
    return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply half-split RoPE to ``x`` [batch, heads, length, head_dim]; ``cos`` and
    ``sin`` [length, head_dim / 2].
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rope_frequencies() -> Tensor:
    """Angle per position of each pair of dimensions, float32 [head_dim / 2]."""
    half = HEAD_DIM // 2
    return ROPE_THETA ** (-torch.arange(half, dtype=torch.float32) / half)


class DemoModel(nn.Module):
    """LLaDA's architecture. Attribute names give the published tensor names after
    ``model.transformer.``.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.wte = nn.Embedding(VOCAB_SIZE, D_MODEL)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.n_layers))
        self.ln_f = nn.RMSNorm(D_MODEL, NORM_EPS)
        self.ff_out = nn.Linear(D_MODEL, VOCAB_SIZE, bias=False)

    def forward(self, canvas: Tensor, first_row: int = 0) -> Tensor:
        """Final normalised hidden states [batch, length - first_row, d_model] of the
        rows from ``first_row`` on.

        The last layer is computed for these rows only: nobody needs predictions inside
        the prompt.
        """
        positions = torch.arange(canvas.shape[1])
        return self.compute(canvas, positions, self.visible(positions), first_row)

    def compute(
        self, tokens: Tensor, positions: Tensor, visible: Tensor | None, first_row: int
    ) -> Tensor:
        """``forward`` for rows that stand at ``positions`` and see the rows that
        ``visible`` says.
        """
        angles = positions.float()[:, None] * rope_frequencies()
        cos, sin = angles.cos(), angles.sin()
        x = self.wte(tokens)
        for block in self.blocks[:-1]:
            x = block(x, cos, sin, visible)
        return self.ln_f(self.blocks[-1](x, cos, sin, visible, first_row))

    def visible(self, positions: Tensor) -> Tensor | None:
        """Which keys each row of a canvas sees, bool [length, length]; None: all."""
        return None


class Guide(DemoModel):
    """The same with causal layers: Llama under LLaDA's attribute names."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        # Drawn a second time: the shipped weights depend on this order of random
        # numbers.
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.n_layers))

    def visible(self, positions: Tensor) -> Tensor:
        return positions[:, None] >= positions


class BlockModel(DemoModel):
    """The same with attention that is causal between blocks: SDAR under LLaDA's
    attribute names.

    Blocks are counted from position 0, so a block may hold the end of the prompt and
    the start of the response.
    """

    def visible(self, positions: Tensor) -> Tensor:
        return positions[:, None] // BLOCK_LENGTH >= positions // BLOCK_LENGTH

    def denoise(self, clean: Tensor, noisy: Tensor, first_row: int) -> Tensor:
        """Hidden states [batch, length - first_row, d_model] of the rows of ``noisy``
        [batch, length] from ``first_row`` on, which starts a block.

        One pass for all blocks: a noisy row sees the noisy rows of its own block, and
        of the blocks before it the rows of the ``clean`` canvas, as if each block were
        being decoded.
        """
        length = clean.shape[1]
        position = torch.arange(length)
        positions = torch.cat([position, position[first_row:]])
        block, is_noisy = (
            positions // BLOCK_LENGTH,
            torch.arange(len(positions)) >= length,
        )
        same, before = block[:, None] == block, block[:, None] > block
        visible = (same & (is_noisy[:, None] == is_noisy)) | (before & ~is_noisy)
        return self.compute(
            torch.cat([clean, noisy[:, first_row:]], dim=1), positions, visible, length
        )
