"""LLaDA and Dream as slow, plain PyTorch: one sequence at a time, nothing shared with the engine.

Written from the papers' description of the models.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

PARTS = {
    "attn_norm": ("attn_norm", "input_layernorm"),
    "mlp_norm": ("ff_norm", "post_attention_layernorm"),
    "q": ("q_proj", "self_attn.q_proj"),
    "k": ("k_proj", "self_attn.k_proj"),
    "v": ("v_proj", "self_attn.v_proj"),
    "out": ("attn_out", "self_attn.o_proj"),
    "gate": ("ff_proj", "mlp.gate_proj"),
    "up": ("up_proj", "mlp.up_proj"),
    "down": ("ff_out", "mlp.down_proj"),
}
"""Parts of a layer: their names in LLaDA's and in Dream's checkpoints."""


@dataclass
class Layer:
    """Weights and biases by the names of ``PARTS``; LLaDA may have no biases."""

    weights: dict[str, torch.Tensor]
    biases: dict[str, torch.Tensor]


class PlainModel:
    """A checkpoint's weights in float32 and its forward pass."""

    def __init__(self, folder: Path) -> None:
        c = self.config = json.loads((folder / "config.json").read_text())
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors.update({name: tensor.float() for name, tensor in load_file(file).items()})
        self.is_dream = c["model_type"] == "Dream"
        self.mask = c["mask_token_id"]
        self.end_tokens = (c["eos_token_id"],)
        if self.is_dream:
            self.heads, self.kv_heads, num_layers = (
                c[f"num_{name}"] for name in ("attention_heads", "key_value_heads", "hidden_layers")
            )
            embedding, norm, head, layer = "model.embed_tokens", "model.norm", "lm_head", "model.layers.{}."
        else:
            self.heads, self.kv_heads, num_layers = (c[f"n_{name}"] for name in ("heads", "kv_heads", "layers"))
            root = "model.transformer."
            embedding, norm, head, layer = root + "wte", root + "ln_f", root + "ff_out", root + "blocks.{}."
        self.embedding, self.norm = tensors[f"{embedding}.weight"], tensors[f"{norm}.weight"]
        tied = c["tie_word_embeddings" if self.is_dream else "weight_tying"]
        self.head = self.embedding if tied else tensors[f"{head}.weight"]
        self.layers = []
        for i in range(num_layers):
            names = {part: layer.format(i) + both[self.is_dream] for part, both in PARTS.items()}
            self.layers.append(
                Layer(
                    {part: tensors[f"{name}.weight"] for part, name in names.items()},
                    {part: tensors[f"{name}.bias"] for part, name in names.items() if f"{name}.bias" in tensors},
                )
            )

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        return self.embedding[torch.tensor(ids)]

    def qkv(self, layer: Layer, x: torch.Tensor, positions: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Queries and keys (both rotated) and values ``[row, head, element]`` of hidden states ``[row, width]``."""
        y = self._rms_norm(x, layer.weights["attn_norm"])
        q, k, v = (
            (y @ layer.weights[part].T + layer.biases.get(part, 0)).unflatten(-1, (heads, -1))
            for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        return self._rotate(q, positions), self._rotate(k, positions), v

    def attention(
        self,
        layer: Layer,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """What the attention adds to the rows of ``q``; ``visible`` are the keys that each KV head sees (None: all)."""
        outs = []
        for h in range(self.heads):
            g = h * self.kv_heads // self.heads
            k, v = (t[:, g] if visible is None else t[list(visible[g]), g] for t in (keys, values))
            outs.append((q[:, h] @ k.T / math.sqrt(q.shape[-1])).softmax(-1) @ v)
        return torch.cat(outs, dim=-1) @ layer.weights["out"].T

    def mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """What the MLP adds to rows."""
        y, w = self._rms_norm(x, layer.weights["mlp_norm"]), layer.weights
        gate = y @ w["gate"].T
        return (gate * torch.sigmoid(gate) * (y @ w["up"].T)) @ w["down"].T

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Raw logits ``[row, vocabulary]`` of the last layer's hidden states."""
        return self._rms_norm(x, self.norm) @ self.head.T

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Raw logits ``[len(ids), vocabulary]``, not shifted."""
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.attention(layer, *self.qkv(layer, x, range(len(ids))))
            x = x + self.mlp(layer, x)
        return self.predict(x)

    def predictions(self, ids: list[int]) -> torch.Tensor:
        """Logits that predict each position: Dream's come from the position before (its first from itself)."""
        raw = self.logits(ids)
        return torch.cat([raw[:1], raw[:-1]]) if self.is_dream else raw

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * weight

    def _rotate(self, x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """RoPE in the half-split layout: element i turns together with element i + d/2."""
        half = x.shape[-1] // 2
        speed = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.tensor(list(positions), dtype=torch.float64)[:, None] * speed
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
