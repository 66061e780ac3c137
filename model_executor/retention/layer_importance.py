"""Importance of layers for layer budgets: the change that each layer makes to its tokens."""

from collections.abc import Iterable

import torch

from dllm_engine.kernels.attention import bidirectional_attention
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases
from dllm_engine.model_executor.step_batch import RowBounds
from dllm_engine.scheduler.methods.layer_budgets import ImportanceName

_ROWS_AT_ONCE = 1024
"""Rows whose hidden states are compared in float32 at once. They take no more memory than vLLM has measured for a
pass."""


def layer_importance(
    name: ImportanceName, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases, rows: RowBounds
) -> torch.Tensor:
    """Importance of each layer to each of some canvases, in a forward pass over them that keeps nothing.

    ``layer_importance`` is MaskKV's (arXiv 2510.09309, equation 8): 1 − mean cosine between a token's hidden states
    before and after a layer. ``attention_importance`` is SqueezeAttention's (arXiv 2404.04793): the same before and
    after the layer's attention, with the residual.

    Args:
        hidden: embeddings of the canvases, which lie end to end, ``[num_rows, hidden_size]``; left as they are.
        rows: of each canvas.

    Returns:
        float32 ``[num_layers, num_canvases]``, 0 to 2, or NaN where hidden states are no numbers.
    """

    def changes(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        parts = zip(before.split(_ROWS_AT_ONCE), after.split(_ROWS_AT_ONCE), strict=True)
        cosines = torch.cat([torch.cosine_similarity(a.float(), b.float(), dim=-1) for a, b in parts])
        means = torch.stack([canvas_cosines.mean() for canvas_cosines in cosines.split(rows.sizes)])
        return 1 - means.clamp(-1, 1)

    importance = []
    for layer in layers:
        q, k, v = layer.qkv(layer.attn_norm(hidden), phases)
        attended = hidden + layer.o_proj(bidirectional_attention(q, k, v, rows.bounds, rows.cu_seqlens))
        after = attended + layer.mlp(layer.mlp_norm(attended))
        importance.append(changes(hidden, after if name == "layer_importance" else attended))
        hidden = after
    return torch.stack(importance)
