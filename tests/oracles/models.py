"""LLaDA and Dream as slow, plain PyTorch: one sequence, one step at a time, nothing shared with the engine.

Written from the papers' description of the models and of decoding without a cache. It also reports how close the
closest decision of a run was, so that a test on random weights can tell a wrong engine from a coin toss.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]
Uniform = Callable[[int, int], torch.Tensor]
"""Uniform numbers in (0, 1), float64 ``[vocabulary]``, for a (forward pass, canvas position)."""


@dataclass
class LayerWeights:
    attn_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_bias: torch.Tensor | None
    k_bias: torch.Tensor | None
    v_bias: torch.Tensor | None
    out: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class PlainModel:
    """A checkpoint's weights in float32 and its forward pass."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        tensors: Tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors.update(load_file(file))
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
        self.is_dream = self.config["model_type"] == "Dream"
        self.mask = self.config["mask_token_id"]
        if self.is_dream:
            self._take_dream(tensors)
        else:
            self._take_llada(tensors)

    def _take_llada(self, t: Tensors) -> None:
        c, root = self.config, "model.transformer."
        self.heads, self.kv_heads = c["n_heads"], c["n_kv_heads"]
        self.embedding, self.norm = t[root + "wte.weight"], t[root + "ln_f.weight"]
        self.head = self.embedding if c["weight_tying"] else t[root + "ff_out.weight"]
        self.layers = []
        for i in range(c["n_layers"]):
            p = f"{root}blocks.{i}."
            self.layers.append(
                LayerWeights(
                    attn_norm=t[p + "attn_norm.weight"],
                    mlp_norm=t[p + "ff_norm.weight"],
                    q=t[p + "q_proj.weight"],
                    k=t[p + "k_proj.weight"],
                    v=t[p + "v_proj.weight"],
                    q_bias=t.get(p + "q_proj.bias"),
                    k_bias=t.get(p + "k_proj.bias"),
                    v_bias=t.get(p + "v_proj.bias"),
                    out=t[p + "attn_out.weight"],
                    gate=t[p + "ff_proj.weight"],
                    up=t[p + "up_proj.weight"],
                    down=t[p + "ff_out.weight"],
                )
            )

    def _take_dream(self, t: Tensors) -> None:
        c = self.config
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.embedding, self.norm = t["model.embed_tokens.weight"], t["model.norm.weight"]
        self.head = self.embedding if c["tie_word_embeddings"] else t["lm_head.weight"]
        self.layers = []
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            self.layers.append(
                LayerWeights(
                    attn_norm=t[p + "input_layernorm.weight"],
                    mlp_norm=t[p + "post_attention_layernorm.weight"],
                    q=t[p + "self_attn.q_proj.weight"],
                    k=t[p + "self_attn.k_proj.weight"],
                    v=t[p + "self_attn.v_proj.weight"],
                    q_bias=t[p + "self_attn.q_proj.bias"],
                    k_bias=t[p + "self_attn.k_proj.bias"],
                    v_bias=t[p + "self_attn.v_proj.bias"],
                    out=t[p + "self_attn.o_proj.weight"],
                    gate=t[p + "mlp.gate_proj.weight"],
                    up=t[p + "mlp.up_proj.weight"],
                    down=t[p + "mlp.down_proj.weight"],
                )
            )

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Raw logits ``[len(ids), vocabulary]``, not shifted."""
        x = self.embedding[torch.tensor(ids)]
        for layer in self.layers:
            x = x + self._attention(layer, self._rms(x, layer.attn_norm))
            y = self._rms(x, layer.mlp_norm)
            gate = y @ layer.gate.T
            x = x + (gate * torch.sigmoid(gate) * (y @ layer.up.T)) @ layer.down.T
        return self._rms(x, self.norm) @ self.head.T

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * weight

    def _attention(self, layer: LayerWeights, y: torch.Tensor) -> torch.Tensor:
        def project(weight: torch.Tensor, bias: torch.Tensor | None, heads: int) -> torch.Tensor:
            out = y @ weight.T
            return (out if bias is None else out + bias).view(len(y), heads, -1)

        q = self._rotate(project(layer.q, layer.q_bias, self.heads))
        k = self._rotate(project(layer.k, layer.k_bias, self.kv_heads))
        v = project(layer.v, layer.v_bias, self.kv_heads)
        outs = []
        for h in range(self.heads):
            g = h * self.kv_heads // self.heads
            scores = q[:, h] @ k[:, g].T / math.sqrt(q.shape[-1])
            outs.append(scores.softmax(-1) @ v[:, g])
        return torch.cat(outs, dim=-1) @ layer.out.T

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """RoPE in the half-split layout: element i turns together with element i + d/2."""
        length, _, d = x.shape
        turned = torch.empty_like(x)
        for i in range(d // 2):
            angle = torch.arange(length, dtype=torch.float64) * self.config["rope_theta"] ** (-2 * i / d)
            cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
            a, b = x[:, :, i], x[:, :, i + d // 2]
            turned[:, :, i] = a * cos - b * sin
            turned[:, :, i + d // 2] = b * cos + a * sin
        return turned

    def predictions(self, ids: list[int]) -> torch.Tensor:
        """Logits that predict each position: Dream's come from the position before (its first from itself)."""
        raw = self.logits(ids)
        return torch.cat([raw[:1], raw[:-1]]) if self.is_dream else raw


@dataclass
class Decoded:
    tokens: list[int]
    """The response."""
    order: list[list[int]] = field(default_factory=list)
    """Canvas positions filled by each forward pass, sorted."""
    closest: float = math.inf
    """Smallest relative margin of any decision."""


def steps_per_block(steps: int, sizes: list[int]) -> list[int]:
    """Every block gets a step; the others are shared by the tokens that a block has beyond one, largest fractions up.

    Of equal fractions the earlier block's goes up.
    """
    beyond_one = sum(sizes) - len(sizes)
    exact = [1 + Fraction((steps - len(sizes)) * (size - 1), max(beyond_one, 1)) for size in sizes]
    shared = [math.floor(share) for share in exact]
    while sum(shared) < steps and beyond_one:
        fractions = [share - given for share, given in zip(exact, shared, strict=True)]
        shared[fractions.index(max(fractions))] += 1
    return shared


def decode(
    model: PlainModel,
    prompt: list[int],
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    unmasking: str,
    top_p: float = 1.0,
    top_k: int = 0,
    temperature: float = 0.0,
    uniform: Uniform | None = None,
    threshold: float | None = None,
) -> Decoded:
    """Decoding without a cache; above temperature 0, ``uniform`` supplies the random numbers.

    With a ``threshold`` a step fills every candidate that is at least as confident, or the best one, and steps do not
    count.
    """
    canvas = prompt + [model.mask] * gen_length
    blocks = [
        (len(prompt) + offset, len(prompt) + min(offset + block_length, gen_length))
        for offset in range(0, gen_length, block_length)
    ]
    result = Decoded([])
    shares = steps_per_block(steps, [end - first for first, end in blocks])
    for (first, end), in_block in zip(blocks, shares, strict=True):
        block_size = end - first
        if threshold is not None:
            in_block = block_size
        for step in range(in_block):
            masked = [p for p in range(first, end) if canvas[p] == model.mask]
            if not masked:
                break
            candidates, count = masked, 0
            if step == in_block - 1:
                count = len(masked)
            elif not model.is_dream:
                count = block_size // in_block + (1 if step < block_size % in_block else 0)
            elif len(blocks) > 1 and step == 0:
                candidates, count = [first], 1
            else:
                count = _dream_count(len(masked), in_block, step)
            rows = _Rows(model, top_p, top_k, temperature, uniform, result)
            _fill(canvas, candidates, count, unmasking, rows, threshold)
    result.tokens = canvas[len(prompt) :]
    return result


def _dream_count(num_masked: int, steps: int, step: int) -> int:
    t = torch.linspace(1, 1e-3, steps + 1)
    return int(num_masked * (1 - t[step + 1] / t[step]))


@dataclass
class _Rows:
    """Turns a row of logits into a distribution and a token."""

    model: PlainModel
    top_p: float
    top_k: int
    temperature: float
    uniform: Uniform | None
    result: Decoded

    def distribution(self, row: torch.Tensor) -> torch.Tensor:
        """Logits that confidences are of: Dream's after temperature and filters, LLaDA's as they are."""
        if not self.model.is_dream:
            return row
        if self.temperature > 0:
            row = row / self.temperature
        return _keep_top_k(_keep_top_p(row, self.top_p, self.result), self.top_k, self.result)

    def token(self, row: torch.Tensor, position: int) -> tuple[int, float]:
        """The predicted token, and by how much it won. Gumbel-max: argmax of exp(logits) / (-log u)^T."""
        score = self.distribution(row).double()
        if self.uniform is not None:
            temperature = 1.0 if self.model.is_dream else self.temperature  # Dream's rows are tempered already
            score = score - temperature * (-self.uniform(len(self.result.order), position).log()).log()
            score[self.model.mask] = -math.inf
        best, second = score.topk(2).values.tolist()
        return int(score.argmax()), _gap(best, second)


def _fill(
    canvas: list[int], candidates: list[int], count: int, unmasking: str, rows: _Rows, threshold: float | None
) -> None:
    """One forward pass; fills the ``count`` most confident candidates of ``canvas`` in place, or those that reach the
    threshold."""
    logits, result = rows.model.predictions(canvas), rows.result
    scored = []
    for position in candidates:
        token, token_gap = rows.token(logits[position], position)
        p = rows.distribution(logits[position]).softmax(-1)
        top = p.topk(2).values
        confidence = {
            "low_confidence": p[token],
            "maskgit_plus": p[token],
            "topk_margin": top[0] - top[1],
            "entropy": (p * (p + 1e-10).log()).sum(),
        }[unmasking]
        scored.append((float(confidence), position, token, token_gap))
    scored.sort(reverse=True)
    if threshold is not None:
        count = max(sum(confidence >= threshold for confidence, *_ in scored), 1)
        result.closest = min(result.closest, *(_gap(confidence, threshold) for confidence, *_ in scored))
    if 0 < count < len(scored):
        result.closest = min(result.closest, _gap(scored[count - 1][0], scored[count][0]))
    for _, position, token, token_gap in scored[:count]:
        canvas[position] = token
        result.closest = min(result.closest, token_gap)
    result.order.append(sorted(position for _, position, _, _ in scored[:count]))


def _keep_top_p(row: torch.Tensor, top_p: float, result: Decoded) -> torch.Tensor:
    """Only the fewest likeliest tokens whose probabilities together exceed ``top_p``."""
    if top_p >= 1:
        return row
    p = row.softmax(-1)
    kept, total = [], 0.0
    for token in p.argsort(descending=True).tolist():
        kept.append(token)
        total += float(p[token])
        result.closest = min(result.closest, 10 * _gap(total, top_p))  # sums are exact to more digits
        if total > top_p:
            break
    return _only(row, kept)


def _keep_top_k(row: torch.Tensor, top_k: int, result: Decoded) -> torch.Tensor:
    if not top_k:
        return row
    ordered = row.sort(descending=True)
    last_kept, first_dropped = ordered.values[top_k - 1 : top_k + 1].tolist()
    if last_kept > torch.finfo(row.dtype).min:  # else top-p has left fewer
        result.closest = min(result.closest, 10 * _gap(last_kept, first_dropped))
    return _only(row, ordered.indices[:top_k].tolist())


def _only(row: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    out = torch.full_like(row, torch.finfo(row.dtype).min)
    out[tokens] = row[tokens]
    return out


def _gap(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-12)
