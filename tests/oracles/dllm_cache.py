"""dLLM-Cache as slow, plain PyTorch; MaskKV (``plain_maskkv``) stands on it.

Every forward pass projects the whole canvas and then keeps only what the method would
have computed, so no row is ever gathered for speed. What the method does not have at a
point is NaN there, so that a result that read it gives itself away.

Readings where the papers leave room, besides those of docs/methods.md:

* Prompt rows keep AttnOut and FFNOut only as long as somebody reads them: never, except
  Dream's last prompt row.
* Adaptive update: the fresh V of all response rows is compared with the cached V, and
  replaces it; then K, AttnOut and FFNOut of only the picked rows. Attention therefore
  sees fresh V everywhere and stale K outside the picked rows.
* Similarities are compared to nine decimals, and among equally similar rows the lowest
  positions are picked. Ties are not rare: in the first layer V depends on the token
  alone, so all untouched rows have similarity 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from dllm_engine.kernels.sampling import uniform
from tests.oracles.buffer import Buffer
from tests.oracles.decoding import Decoding


def most_changed(
    fresh: torch.Tensor, cached: torch.Tensor, count: int, metric: str
) -> tuple[list[int], float]:
    """The ``count`` rows of ``[rows, ...]`` whose values differ most from the cached
    ones, sorted: in direction, or by their distance; and the difference of similarity
    between the last of them and the first one left out."""
    a = fresh.double().flatten(1)
    b = cached.double().flatten(1)
    if metric == "l2":
        similarity = -(a - b).square().sum(-1) / (2 * b.square().sum(-1).max())
    else:
        similarity = torch.cosine_similarity(a, b, dim=-1)
    similarity = similarity.round(
        decimals=9
    )  # the same numbers by another route differ by about 1e-14
    order = similarity.argsort(stable=True).tolist()
    gap = (
        float(similarity[order[count]] - similarity[order[count - 1]])
        if 0 < count < len(order)
        else math.inf
    )
    return sorted(order[:count]), gap


@dataclass
class AdaptiveCache:
    """Successive forward passes over the canvas of one request, which share caches.

    ``adapt_beside_prompt``: dLLM-Cache's code updates the response adaptively also when
    only the prompt is due; MaskKV reuses the response then.
    """

    adapt_beside_prompt: ClassVar[bool] = True
    run: Decoding
    prompt_refresh_interval: int = 50
    response_refresh_interval: int = 7
    update_ratio: float = 0.25
    similarity: str = "value"
    similarity_metric: str = "cosine"
    refresh_first_layer: bool = True
    exclude_prompt_states: bool = True
    interval_unit: str = "tokens"

    def __post_init__(self) -> None:
        self.model = self.run.model
        self.buffer = Buffer(self.run)
        shape = (len(self.model.layers), self.run.length, self.model.embedding.shape[1])
        self.attn, self.mlp = torch.full(shape, math.nan), torch.full(shape, math.nan)
        """What attention, after the output projection, and MLP last added to each row,
        by layer.
        """
        self.updated: list[list[list[int]]] = []
        """Per pass with adaptive updates, the canvas positions that each layer
        recomputed.
        """
        self.run.traces["updated_positions"] = self.updated

    def decode(self) -> None:
        for _ in self.run.passes():
            logits, fed = self.forward()
            self.run.fill(logits, fed)

    def due(self) -> list[bool]:
        """Whether the prompt and the response are refreshed in the pass that begins."""
        reached: Sequence[int] = [len(self.run.order)]
        if self.run.parallel and self.interval_unit == "tokens":
            reached = self.run.counts_of_last_pass
        intervals = self.prompt_refresh_interval, self.response_refresh_interval
        return [
            not self.run.order or any(number % interval == 0 for number in reached)
            for interval in intervals
        ]

    def forward(self) -> tuple[torch.Tensor, range]:
        """The next forward pass: its logits, NaN in rows of the prompt of which nothing
        is known, and rows fed.
        """
        model, length, prompt_length = self.model, self.run.length, len(self.run.prompt)
        prompt_due, response_due = self.due()
        prompt = list(range(prompt_length))
        response = list(range(prompt_length, self.run.cut))
        live = (
            prompt_length - model.is_dream
        )  # Dream's last prompt row predicts the first token of the response
        adapts = (
            not response_due
            and self.update_ratio > 0
            and (self.adapt_beside_prompt or not prompt_due)
        )
        updated: list[list[int]] = []
        x = model.embed(self.run.canvas)
        for number, layer in enumerate(model.layers):
            q, k, v = model.qkv(layer, x, range(length))
            keys, values, attn, mlp = (
                t[number] for t in (self.buffer.k, self.buffer.v, self.attn, self.mlp)
            )
            always = self.refresh_first_layer and number == 0
            rows = prompt if prompt_due or always else []
            if response_due or always:
                rows = rows + response
            elif adapts and self.similarity == "random":
                updated.append(self.drawn(number, response))
                rows = rows + updated[-1]
            elif adapts:
                fresh, cached = (v, values) if self.similarity == "value" else (k, keys)
                count = int(len(response) * self.update_ratio)
                picked, gap = most_changed(
                    fresh[response], cached[response], count, self.similarity_metric
                )
                if gap > 0:  # ties are decided by position
                    self.run.decided(50 * gap)
                cached[response] = fresh[response]
                updated.append([prompt_length + row for row in picked])
                rows = rows + updated[-1]

            keys[rows], values[rows] = k[rows], v[rows]
            attn[rows] = model.attention(
                layer, q[rows], keys, values, self.visible(number)
            )
            x = x + attn
            mlp[rows] = model.mlp(layer, x[rows])
            x = x + mlp
            self.after_layer(number, q)
            attn[:live] = mlp[:live] = math.nan
        if adapts:
            self.updated.append(updated)
        whole = prompt_due or not self.exclude_prompt_states
        return model.predict(x), range(0 if whole else live, self.run.cut)

    def drawn(self, layer: int, response: list[int]) -> list[int]:
        """Rows of the lowest random numbers."""
        counters = [
            torch.tensor(value)
            for value in (self.run.seed, len(self.run.order), response, -2 - layer)
        ]
        lowest = (
            uniform(*counters)
            .argsort()
            .tolist()[: int(len(response) * self.update_ratio)]
        )
        return sorted(response[row] for row in lowest)

    def visible(self, number: int) -> list[list[int]] | None:
        """Per KV head, the positions that queries of a layer attend to in this forward
        pass (None: all).
        """
        return (
            None
            if self.run.cut == self.run.length
            else [list(range(self.run.cut))] * self.model.kv_heads
        )

    def after_layer(self, number: int, q: torch.Tensor) -> None:
        """Called when a layer is done, with the queries of the whole canvas."""


def plain_dllm_cache(run: Decoding, **options: object) -> None:
    AdaptiveCache(run, **options).decode()  # type: ignore[arg-type]
