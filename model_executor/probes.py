"""How much each layer changes its tokens: the offline profile that MaskKV shares its budget by (arXiv 2510.09309)."""

from collections.abc import Iterable

import torch

from dllm_engine.kernels.attention import bidirectional_attention
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases
from dllm_engine.model_executor.passes.base import LayerPass


class ProfilingPass(LayerPass):
    """A dense pass over one canvas that measures every layer."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.importance: list[float] = []
        """Per layer 1 − mean cosine between a token's hidden state before and after it (equation 8), 0 … 2."""

    def __call__(self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases) -> torch.Tensor:
        for layer in layers:
            q, k, v = layer.qkv(layer.attn_norm(hidden), phases)
            attended = bidirectional_attention(q, k, v, [0, self.num_rows])
            after = hidden + layer.o_proj(attended)
            after += layer.mlp(layer.mlp_norm(after))
            self.importance.append(
                float(1 - torch.cosine_similarity(hidden.double(), after.double(), dim=-1).mean().clamp(-1, 1))
            )
            hidden = after
        return hidden
