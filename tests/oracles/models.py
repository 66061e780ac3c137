"""All models as slow, plain PyTorch: one sequence at a time, nothing shared with the
engine.

Written from the papers' description of the models.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

PARTS = {
    "attn_norm": ("attn_norm", "input_layernorm"),
    "mlp_norm": ("ff_norm", "post_attention_layernorm"),
    "q": ("q_proj", "self_attn.q_proj"),
    "k": ("k_proj", "self_attn.k_proj"),
    "v": ("v_proj", "self_attn.v_proj"),
    "qkv": ("", "attention.query_key_value"),
    "out": ("attn_out", "self_attn.o_proj"),
    "gate": ("ff_proj", "mlp.gate_proj"),
    "up": ("up_proj", "mlp.up_proj"),
    "down": ("ff_out", "mlp.down_proj"),
    "q_norm": ("", "self_attn.q_norm"),
    "k_norm": ("", "self_attn.k_norm"),
    "router": ("", "mlp.gate"),
    "shared.gate": ("", "shared_expert.gate_proj"),
    "shared.up": ("", "shared_expert.up_proj"),
    "shared.down": ("", "shared_expert.down_proj"),
}
"""Parts of a layer: their names in LLaDA's checkpoints, and in those of the other
families.
"""
LLADA2_PARTS = {
    "out": "attention.dense",
    "q_norm": "attention.query_layernorm",
    "k_norm": "attention.key_layernorm",
    **{
        f"shared.{part}": f"mlp.shared_experts.{part}_proj"
        for part in ("gate", "up", "down")
    },
}
"""Those that LLaDA2 names otherwise."""
SAMPLED_AS_DREAM = ("DreamModel", "OpenDcoderForCausalLM", "Qwen2ForCausalLM")
"""Architectures. Open-dLLM's checkpoints state the last."""
OTHER_BLOCK_SIZES = {
    "LLaDA2MoeModelLM": 32,
    "Fast_dLLM_QwenForCausalLM": 32,
    "NemotronLabsDiffusionModel": 32,
}
"""Of blocks that a config does not state, by architecture."""


@dataclass
class Layer:
    """Weights and biases by the names of ``PARTS``, as far as there are any; of expert
    3, ``3.gate`` and so on.
    """

    weights: dict[str, torch.Tensor]
    biases: dict[str, torch.Tensor]
    expert_bias: torch.Tensor | float


def rope_speeds(
    config: dict[str, Any], width: int, longest: int = 0
) -> tuple[torch.Tensor, float]:
    """Angles per position of ``width`` numbers of a head, ``[width / 2]``, and what
    cosine and sine are times.

    Scaled ones are transformers', by the names and in the one place that it has for
    them. ``dynamic`` is for sequences up to the longest.
    """
    rope = {
        **(config.get("rope_scaling") or {}),
        **(config.get("rope_parameters") or {}),
    }
    rope.pop("llama_4_scaling_beta", None)
    kind = rope.get("rope_type", rope.get("type", "default"))
    base = float(rope.get("rope_theta") or config["rope_theta"])
    if kind == "default":
        return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width), 1.0
    trained = config.get("max_sequence_length") or config["max_position_embeddings"]
    rope |= {"rope_type": kind, "rope_theta": base, "partial_rotary_factor": 1.0}
    own = LlamaConfig(
        head_dim=width, max_position_embeddings=trained, rope_parameters=rope
    )
    return ROPE_INIT_FUNCTIONS[kind](own, torch.device("cpu"), seq_len=longest)


def attention_weights(
    q: torch.Tensor, keys: torch.Tensor, head: int, ends: Sequence[int] | None = None
) -> torch.Tensor:
    """How much each row of queries attends to each key, in one head. ``ends``: what each
    row sees ends before it."""
    k = keys[:, head * keys.shape[1] // q.shape[1]]
    scores = q[:, head] @ k.T / math.sqrt(q.shape[-1])
    if ends is not None:
        unseen = torch.arange(len(k)) >= torch.tensor(ends)[:, None]
        scores = scores.masked_fill(unseen, -math.inf)
    return scores.softmax(-1)


class PlainModel:
    """A checkpoint's weights in float32 and its forward pass."""

    def __init__(self, folder: Path, longest: int = 0) -> None:
        """``longest``: the longest sequence that it is served for."""
        c = self.config = json.loads((folder / "config.json").read_text())
        self.folder, self.longest = folder, longest
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors.update(
                {name: tensor.float() for name, tensor in load_file(file).items()}
            )
        (architecture,) = c["architectures"]
        self.is_dream = architecture in SAMPLED_AS_DREAM
        """Whether it is decoded by Dream's sampler."""
        self.exceeds_entropy = architecture == "DreamModel"
        """Whether ``entropy_threshold`` itself is too much, and may let nothing pass."""
        self.seeds_blocks = architecture in (
            "Fast_dLLM_QwenForCausalLM",
            "NemotronLabsDiffusionModel",
        )
        """Whether a pass of its own predicts the first position of a block."""
        self.shifts = self.is_dream or architecture == "Fast_dLLM_QwenForCausalLM"
        """Whether rows predict the position behind them."""
        self.is_causal = architecture == "NemotronLabsDiffusionModel"
        """Whether only rows of the running block see what is behind them."""
        is_a2d = architecture.startswith("A2D")
        by_blocks = is_a2d and "bd3lm" in (c.get("kind"), *folder.name.split("-"))
        self.rounds = is_a2d
        """Whether the counts of steps are rounded shares of what is left."""
        self.counts_back = by_blocks or self.is_causal
        """Whether blocks are counted from the response's first position."""
        default = 32 if by_blocks else OTHER_BLOCK_SIZES.get(architecture)
        self.block_length: int | None = c.get("block_size", c.get("bd_size", default))
        """Of the blocks that attention goes by."""
        self.whole_blocks = not self.counts_back and (
            architecture != "StableDiffcoderForCausalLM"
        )
        is_llada2 = c["model_type"] == "llada2_moe"
        self.mask = c["mask_token_id"]
        self.end_tokens: Sequence[int] = (c["eos_token_id"],)
        self.turn_ends: Sequence[int] = ()
        transformers_names = "hidden_size" in c
        if transformers_names:
            self.heads, self.kv_heads, num_layers = (
                c[f"num_{name}"]
                for name in ("attention_heads", "key_value_heads", "hidden_layers")
            )
            embedding = "model.word_embeddings" if is_llada2 else "model.embed_tokens"
            norm, head, layer = "model.norm", "lm_head", "model.layers.{}."
            if self.is_causal:
                embedding, norm = "encoder.embed_tokens", "encoder.norm"
                head, layer = "diffusion_head", "encoder.layers.{}."
        else:
            self.heads, self.kv_heads, num_layers = (
                c[f"n_{name}"] for name in ("heads", "kv_heads", "layers")
            )
            root = "model.transformer."
            embedding = root + "wte"
            norm = root + "ln_f"
            head = root + "ff_out"
            layer = root + "blocks.{}."
        self.embedding = tensors[f"{embedding}.weight"]
        self.norm = tensors[f"{norm}.weight"]
        tied = c["tie_word_embeddings" if transformers_names else "weight_tying"]
        self.head = self.embedding if tied else tensors[f"{head}.weight"]
        self.layers = []
        for i in range(num_layers):
            prefix = layer.format(i)
            names = {
                part: prefix + both[transformers_names] for part, both in PARTS.items()
            }
            names |= {
                part: prefix + name for part, name in LLADA2_PARTS.items() if is_llada2
            }
            for n in range(c.get("num_experts", 0)):
                names |= {
                    f"{n}.{part}": f"{prefix}mlp.experts.{n}.{part}_proj"
                    for part in ("gate", "up", "down")
                }
            weights, biases = (
                {
                    part: tensors[f"{name}.{kind}"]
                    for part, name in names.items()
                    if f"{name}.{kind}" in tensors
                }
                for kind in ("weight", "bias")
            )
            if "qkv" in weights:
                fused = weights.pop("qkv").split(
                    [n * c["head_dim"] for n in (self.heads, *[self.kv_heads] * 2)]
                )
                weights |= dict(zip("qkv", fused, strict=True))
            bias = tensors.get(
                f"{prefix}mlp.expert_bias",
                tensors.get(f"{prefix}mlp.gate.expert_bias", 0.0),
            )
            self.layers.append(Layer(weights, biases, bias))
        self.draft_layers = self.layers
        """Those of rows that draft."""

    def draft_with(self, name: str | None) -> None:
        """Give rows that draft the update of a LoRA adapter in the model's folder; None:
        no update.
        """
        if name is None:
            self.draft_layers = self.layers
            return
        adapter = self.folder / name
        config = json.loads((adapter / "adapter_config.json").read_text())
        tensors = load_file(adapter / "adapter_model.safetensors")
        self.draft_layers = []
        for i, layer in enumerate(self.layers):
            name = f"base_model.model.encoder.layers.{i}.self_attn.o_proj.lora_"
            a, b = (tensors[f"{name}{part}.weight"].float() for part in "AB")
            out = layer.weights["out"] + config["lora_alpha"] / config["r"] * b @ a
            self.draft_layers.append(
                replace(layer, weights={**layer.weights, "out": out})
            )

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        return self.embedding[torch.tensor(ids)]

    def qkv(
        self, layer: Layer, x: torch.Tensor, positions: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        """Queries and keys (both rotated) and values ``[row, head, element]`` of hidden
        states ``[row, width]``.
        """
        y = self._rms_norm(x, layer.weights["attn_norm"])
        q, k, v = (
            (y @ layer.weights[part].T + layer.biases.get(part, 0)).unflatten(
                -1, (heads, -1)
            )
            for part, heads in (
                ("q", self.heads),
                ("k", self.kv_heads),
                ("v", self.kv_heads),
            )
        )
        if "q_norm" in layer.weights:
            q = self._rms_norm(q, layer.weights["q_norm"])
            k = self._rms_norm(k, layer.weights["k_norm"])
        q, k = self._rotate(q, positions), self._rotate(k, positions)
        return q * self._query_scales(positions), k, v

    def _query_scales(self, positions: Sequence[int]) -> torch.Tensor:
        """Factors ``[row, 1, 1]`` of queries, which grow with the number of times that
        a position exceeds the length of training (Nemotron-Labs-Diffusion)."""
        rope = self.config.get("rope_parameters") or {}
        beta = rope.get("llama_4_scaling_beta") or 0.0
        trained = rope.get("original_max_position_embeddings") or 1
        scales = [1 + beta * math.log(1 + n // trained) for n in positions]
        return torch.tensor(scales)[:, None, None]

    def attention(
        self,
        layer: Layer,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: Sequence[Sequence[int]] | None = None,
        ends: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """What the attention adds to the rows of ``q``; ``visible`` are the keys that
        each KV head sees, and ``ends`` where those end that each row sees (None: all).
        """
        outs = []
        for h in range(self.heads):
            g = h * self.kv_heads // self.heads
            k, v = (
                (keys, values)
                if visible is None
                else (t[list(visible[g])] for t in (keys, values))
            )
            outs.append(attention_weights(q, k, h, ends) @ v[:, g])
        return torch.cat(outs, dim=-1) @ layer.weights["out"].T

    def mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """What the MLP adds to rows."""
        y = self._rms_norm(x, layer.weights["mlp_norm"])
        w = layer.weights

        def gated(y: torch.Tensor, prefix: str) -> torch.Tensor:
            gate = y @ w[f"{prefix}gate"].T
            return (gate * torch.sigmoid(gate) * (y @ w[f"{prefix}up"].T)) @ w[
                f"{prefix}down"
            ].T

        if "router" not in w:
            return gated(y, "")
        added = gated(y, "shared.") if "shared.gate" in w else torch.zeros_like(y)
        if "n_group" in self.config:
            shares, chosen = self._shares_by_group(y @ w["router"].T, layer.expert_bias)
        else:
            shares = (y @ w["router"].T).softmax(-1) + layer.expert_bias
            chosen = shares.argsort(descending=True)[
                :, : self.config["num_experts_per_tok"]
            ]
            if self.config.get("norm_topk_prob"):
                shares = shares / shares.gather(1, chosen).sum(-1, keepdim=True)
        for n in chosen.unique().tolist():
            rows = (chosen == n).any(-1)
            added[rows] += shares[rows, n, None] * gated(y[rows], f"{n}.")
        return added

    def _shares_by_group(
        self, logits: torch.Tensor, bias: torch.Tensor | float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """LLaDA2: weights of all experts for each row, and those that it goes through;
        a row at a time. LLaDA2.2: the rows of a block go through the experts that are
        the best for any of them."""
        c, all_shares, chosen = self.config, [], []
        capacity = c.get("expert_capacity")
        length = self.block_length
        for i, scores in enumerate(logits.sigmoid()):
            biased = (scores + bias).tolist()
            size = len(biased) // c["n_group"]
            groups = [
                range(start, start + size) for start in range(0, len(biased), size)
            ]
            groups.sort(key=lambda group: -sum(sorted(biased[n] for n in group)[-2:]))
            allowed = [n for group in groups[: c["topk_group"]] for n in group]
            if capacity:
                block = (logits.sigmoid() + bias)[i // length * length :][:length]
                allowed = block.amax(0).argsort(descending=True)[:capacity].tolist()
            best = sorted(allowed, key=lambda n: -biased[n])[: c["num_experts_per_tok"]]
            total = sum(scores[n] for n in best) if len(best) > 1 else 1.0
            all_shares.append(scores / total * c["routed_scaling_factor"])
            chosen.append(torch.tensor(best))
        return torch.stack(all_shares), torch.stack(chosen)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Raw logits ``[row, vocabulary]`` of the last layer's hidden states."""
        return self._rms_norm(x, self.norm) @ self.head.T

    def logits(
        self,
        ids: list[int],
        block_length: int | None = None,
        lead: int = 0,
        causal_stop: int = 0,
        *,
        drafts: bool = False,
    ) -> torch.Tensor:
        """Raw logits ``[len(ids), vocabulary]``, not shifted. ``block_length``: another
        one than the config's. ``lead``: what the first block lacks. Rows before
        ``causal_stop`` see nothing behind them; ``drafts``: the others draft.
        """
        count = len(ids)
        length = block_length or self.block_length or count
        # A block sees itself and those before it.
        ends = [
            min((i + lead) // length * length + length - lead, count)
            for i in range(count)
        ]
        ends[:causal_stop] = range(1, causal_stop + 1)
        x = self.embed(ids)
        for layer, draft_layer in zip(
            self.layers, self.draft_layers if drafts else self.layers, strict=True
        ):
            q, k, v = self.qkv(layer, x, range(count))
            stop = causal_stop
            x = x + torch.cat(
                [
                    self.attention(layer, q[:stop], k, v, None, ends[:stop]),
                    self.attention(draft_layer, q[stop:], k, v, None, ends[stop:]),
                ]
            )
            x = x + self.mlp(layer, x)
        return self.predict(x)

    def predictions(self, ids: list[int], lead: int = 0) -> torch.Tensor:
        """Logits that predict each position: Dream's come from the position before (its
        first from itself). ``lead``: what the first block lacks.
        """
        raw = self.logits(ids, lead=lead)
        return torch.cat([raw[:1], raw[:-1]]) if self.shifts else raw

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (
            x
            / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
            * weight
        )

    def _rotate(self, x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """RoPE in the half-split layout: element i turns together with element i + d/2.
        LLaDA2 turns a part alone.
        """
        turned = int(x.shape[-1] * (self.config.get("partial_rotary_factor") or 1))
        x, rest = x[..., :turned], x[..., turned:]
        half = turned // 2
        speed, scale = rope_speeds(self.config, turned, self.longest)
        angle = torch.tensor(list(positions), dtype=torch.float64)[:, None] * speed
        cos = (angle.cos() * scale).float()[:, None]
        sin = (angle.sin() * scale).float()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
