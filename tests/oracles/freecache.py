"""FreeCache as slow, plain PyTorch.

Readings where the paper leaves room:

* The first forward pass computes the whole canvas. The prompt's keys and values come from it and are never renewed.
* Later passes feed the current block and, with ``include_suffix``, the masked positions behind it. They attend to the
  cached clean positions (the prompt and finished blocks) and to each other.
* A finished block is fed once more, with its final tokens, in the next block's first pass; its keys and values come
  from there, without a pass of its own. The last block's are never needed.
* Without ``include_suffix`` no pass after the first sees what is behind the block. Whether the very first one does is
  ``first_forward_whole``; if not, it feeds the prompt and the first block.
* Dream goes by its block rule, also if there is one block only: a block's first pass fills only its first position,
  outside the schedule. That position is predicted by the row before it, which that pass computes: it belongs to the
  finished block or, in the first pass of all, to the prompt. Afterwards all predicting rows lie in the block.
* A block ends when it holds no mask. The prompt's outputs are not kept, only its keys and values.
"""

import math
from typing import Any

import torch

from tests.oracles.models import LayerWeights, PlainModel, steps_per_block


class _CleanCache:
    """Keys and values of clean positions; NaN elsewhere."""

    def __init__(self, model: PlainModel, canvas_length: int) -> None:
        self.model = model
        head_size = len(model.layers[0].q) // model.heads
        shape = (len(model.layers), canvas_length, model.kv_heads, head_size)
        self.k, self.v = torch.full(shape, math.nan), torch.full(shape, math.nan)
        self.clean: list[int] = []

    def forward(self, canvas: list[int], fed: list[int], cleaned: list[int]) -> torch.Tensor:
        """Raw logits ``[canvas, vocabulary]``, NaN where nothing is fed; ``cleaned`` are cached from this pass on."""
        model = self.model
        x = model.embedding[torch.tensor(canvas)[fed]]
        for number, layer in enumerate(model.layers):
            y = model._rms(x, layer.attn_norm)
            q, k, v = self._project(layer, y, fed)
            keys = torch.cat([self.k[number, self.clean], k])
            values = torch.cat([self.v[number, self.clean], v])
            outs = []
            for h in range(model.heads):
                g = h * model.kv_heads // model.heads
                scores = q[:, h] @ keys[:, g].T / math.sqrt(q.shape[-1])
                outs.append(scores.softmax(-1) @ values[:, g])
            x = x + torch.cat(outs, dim=-1) @ layer.out.T
            y = model._rms(x, layer.mlp_norm)
            gate = y @ layer.gate.T
            x = x + (gate * torch.sigmoid(gate) * (y @ layer.up.T)) @ layer.down.T
            for position in cleaned:
                self.k[number, position], self.v[number, position] = k[fed.index(position)], v[fed.index(position)]
        self.clean = sorted(self.clean + cleaned)
        logits = torch.full((len(canvas), len(model.head)), math.nan)
        logits[fed] = model._rms(x, model.norm) @ model.head.T
        return logits

    def _project(
        self, layer: LayerWeights, y: torch.Tensor, fed: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model = self.model

        def heads(weight: torch.Tensor, bias: torch.Tensor | None, count: int) -> torch.Tensor:
            out = y @ weight.T
            return (out if bias is None else out + bias).view(len(fed), count, -1)

        def rotate(x: torch.Tensor) -> torch.Tensor:
            """At the rows' true positions."""
            spread = torch.zeros(max(fed) + 1, *x.shape[1:])
            spread[fed] = x
            return model._rotate(spread)[fed]

        q, k = heads(layer.q, layer.q_bias, model.heads), heads(layer.k, layer.k_bias, model.kv_heads)
        return rotate(q), rotate(k), heads(layer.v, layer.v_bias, model.kv_heads)


def plain_freecache(
    model: PlainModel,
    prompt_ids: list[int],
    *,
    gen_length: int,
    block_length: int,
    steps: int | None = None,
    threshold: float | None = None,
    unmasking: str = "low_confidence",
    include_suffix: bool = True,
    first_forward_whole: bool = True,
) -> dict[str, Any]:
    """Decode with FreeCache, by a schedule of ``steps`` over all blocks or by a ``threshold`` on the confidence.

    The result: ``tokens`` of the response; ``order``, canvas positions unmasked per forward pass; ``computed``, canvas
    positions fed per forward pass; ``closest``, the smallest relative margin of any decision.
    """
    if (steps is None) == (threshold is None):
        raise ValueError("give either steps or threshold")
    prompt_length, length = len(prompt_ids), len(prompt_ids) + gen_length
    canvas = prompt_ids + [model.mask] * gen_length
    blocks = [(s, min(s + block_length, length)) for s in range(prompt_length, length, block_length)]
    cache = _CleanCache(model, length)
    order: list[list[int]] = []
    computed: list[list[int]] = []
    closest = math.inf
    for number, (first, end) in enumerate(blocks):
        in_block = None
        if steps is not None:
            in_block = steps_per_block(steps, [end - first for first, end in blocks])[number]
        step = 0
        while any(canvas[position] == model.mask for position in range(first, end)):
            last_fed = length if include_suffix else end
            cleaned: list[int] = []
            if step > 0:
                fed = list(range(first, last_fed))
            elif number > 0:
                fed = list(range(blocks[number - 1][0], last_fed))
                cleaned = list(range(*blocks[number - 1]))
            else:
                fed = list(range(length if first_forward_whole else last_fed))
                cleaned = list(range(prompt_length))
            logits = cache.forward(canvas, fed, cleaned)
            computed.append(fed)

            masked = [position for position in range(first, end) if canvas[position] == model.mask]
            scored = []
            for position in masked:
                row = logits[position - 1 if model.is_dream else position]
                confidence, token, margin = _score(row, unmasking)
                scored.append((confidence, position, token, margin))
            scored.sort(key=lambda entry: (-entry[0], entry[1]))
            if model.is_dream and step == 0 and in_block != 1:
                chosen = [entry for entry in scored if entry[1] == first]
            elif threshold is not None:
                chosen = scored[:1] + [entry for entry in scored[1:] if entry[0] >= threshold]
                closest = min([closest, *(_gap(entry[0], threshold) for entry in scored)])
                if scored[0][0] < threshold and len(scored) > 1:
                    closest = min(closest, _gap(scored[0][0], scored[1][0]))
            else:
                assert in_block is not None
                count = _count(model, len(masked), end - first, in_block, step)
                chosen = scored[:count]
                if 0 < count < len(scored):
                    closest = min(closest, _gap(scored[count - 1][0], scored[count][0]))
            for _, position, token, margin in chosen:
                canvas[position] = token
                closest = min(closest, margin)
            order.append(sorted(position for _, position, _, _ in chosen))
            step += 1
    return {"tokens": canvas[prompt_length:], "order": order, "computed": computed, "closest": closest}


def _count(model: PlainModel, masked: int, block_size: int, in_block: int, step: int) -> int:
    """How many positions the schedule of a block fills."""
    if step == in_block - 1:
        return masked
    if model.is_dream:
        t = torch.linspace(1, 1e-3, in_block + 1)
        return int(masked * (1 - t[step + 1] / t[step]))
    return block_size // in_block + (1 if step < block_size % in_block else 0)


def _score(row: torch.Tensor, unmasking: str) -> tuple[float, int, float]:
    """Confidence, predicted token, and by how much it won."""
    p = row.softmax(-1)
    top = p.topk(2).values
    best, second = row.topk(2).values.tolist()
    confidence = {
        "low_confidence": top[0],
        "maskgit_plus": top[0],
        "topk_margin": top[0] - top[1],
        "entropy": (p * (p + 1e-10).log()).sum(),
    }[unmasking]
    return float(confidence), int(row.argmax()), _gap(best, second)


def _gap(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-12)
