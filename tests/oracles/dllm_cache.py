"""dLLM-Cache as slow, plain PyTorch; MaskKV (``plain_maskkv``) stands on it.

Every forward pass projects the whole canvas and then keeps only what the method would have computed, so no row is ever
gathered for speed. What the method does not have at a point is NaN there, so that a result that read it gives itself
away.

Readings where the papers leave room:

* Forward passes are counted from n = 1 over the whole generation, never restarted at a block. The prompt is due when
  (n - 1) mod Kp = 0, the response (everything behind the prompt) when (n - 1) mod Kr = 0.
* With a threshold, intervals count unmasked tokens: the prompt is due in the first pass, and in those between which and
  the pass before the number of unmasked tokens reached or passed a multiple of Kp; the response likewise.
* The hidden state of a row that is not recomputed is the live residual plus the row's cached AttnOut and FFNOut.
* At a response refresh without a prompt refresh no prompt row is computed.
* Prompt rows keep AttnOut and FFNOut only as long as somebody reads them: never, except Dream's last prompt row, whose
  output predicts the first token of the response.
* Adaptive update: cosine similarity between the fresh V of all response rows (all KV heads as one vector) and the
  cached V, in float64; then the cached V of all of them is replaced; then K, AttnOut and FFNOut of only the picked
  rows. Attention therefore sees fresh V everywhere and stale K outside the picked rows.
* Similarities are compared to nine decimals, and among equally similar rows the lowest positions are picked. Ties are
  not rare: in the first layer V depends on the token alone, so all untouched rows have similarity 1, and a row that is
  not recomputed in one layer is untouched in the next. Where the first layer is not refreshed in every pass, the rows
  decoded last and the lowest positions are therefore picked, in all layers.
* An update ratio of 0 reuses the response fully (V too). A positive one that rounds down to no row still replaces V.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from tests.oracles.models import LayerWeights, PlainModel, decode


@dataclass
class LayerCache:
    k: torch.Tensor
    """``[canvas, KV heads, head size]``, after RoPE."""
    v: torch.Tensor
    attn: torch.Tensor
    """``[canvas, width]``, after the output projection."""
    mlp: torch.Tensor


@dataclass
class Picked:
    """Rows an adaptive update recomputes."""

    rows: list[int]
    gap: float
    """Difference of similarity between the last row picked and the first one left out."""


def v_verify(fresh: torch.Tensor, cached: torch.Tensor, count: int) -> Picked:
    """The ``count`` rows of ``[rows, ...]`` whose values differ most in direction from the cached ones, sorted."""
    new, old = fresh.double().flatten(1), cached.double().flatten(1)
    similarity = torch.cosine_similarity(new, old, dim=-1)
    similarity = similarity.round(decimals=9)  # the same numbers by another route differ by about 1e-14
    order = similarity.argsort(stable=True).tolist()
    gap = float(similarity[order[count]] - similarity[order[count - 1]]) if 0 < count < len(order) else math.inf
    return Picked(sorted(order[:count]), gap)


class DllmCacheModel(PlainModel):
    """A model whose successive forward passes over one canvas share caches."""

    def __init__(
        self,
        model: PlainModel,
        prompt_length: int,
        *,
        prompt_refresh_interval: int,
        response_refresh_interval: int,
        update_ratio: float,
        first_layer_always: bool,
        adapt_beside_prompt: bool,
        count_tokens: bool = False,
    ) -> None:
        self.__dict__.update(model.__dict__)  # the same weights
        self.prompt_length = prompt_length
        self.prompt_refresh_interval = prompt_refresh_interval
        self.response_refresh_interval = response_refresh_interval
        self.update_ratio = update_ratio
        self.first_layer_always = first_layer_always
        self.adapt_beside_prompt = adapt_beside_prompt
        self.count_tokens = count_tokens
        self.forwards = 0
        self.unmasked = 0
        self.caches: list[LayerCache] = []
        self.updated: dict[int, dict[int, list[int]]] = {}
        self.closest_similarity = math.inf
        self.similarity_ties = 0

    def logits(self, ids: list[int]) -> torch.Tensor:
        """The next forward pass. Rows of the prompt are NaN where nothing is known of them."""
        before, self.forwards = self.forwards, self.forwards + 1
        reached = [before]
        if self.count_tokens:
            known = sum(token != self.mask for token in ids[self.prompt_length :])
            # Of the tokens of the last pass, how many were unmasked when each of them was.
            reached, self.unmasked = list(range(self.unmasked + 1, known + 1)), known
        prompt_due = before == 0 or any(number % self.prompt_refresh_interval == 0 for number in reached)
        response_due = before == 0 or any(number % self.response_refresh_interval == 0 for number in reached)
        prompt, response = list(range(self.prompt_length)), list(range(self.prompt_length, len(ids)))
        forgotten = prompt[:-1] if self.is_dream else prompt
        x = self.embedding[torch.tensor(ids)]
        for number, layer in enumerate(self.layers):
            q, k, v = self.project(layer, self._rms(x, layer.attn_norm))
            if before == 0:
                self.caches.append(LayerCache(*(torch.full_like(t, math.nan) for t in (k, v, x, x))))
            cache = self.caches[number]

            always = self.first_layer_always and number == 0
            rows = prompt if prompt_due or always else []
            if response_due or always:
                rows = rows + response
            elif self.update_ratio > 0 and (self.adapt_beside_prompt or not prompt_due):
                picked = self._pick(number, v[response], cache.v[response])
                cache.v[response] = v[response]
                rows = rows + picked

            cache.k[rows], cache.v[rows] = k[rows], v[rows]
            cache.attn[rows] = self._attend(q[rows], cache, self.visible(number, len(ids))) @ layer.out.T
            x = x + cache.attn
            y = self._rms(x[rows], layer.mlp_norm)
            gate = y @ layer.gate.T
            cache.mlp[rows] = (gate * torch.sigmoid(gate) * (y @ layer.up.T)) @ layer.down.T
            x = x + cache.mlp

            self.after_layer(number, q, cache)
            cache.attn[forgotten] = math.nan
            cache.mlp[forgotten] = math.nan
        return self._rms(x, self.norm) @ self.head.T

    def visible(self, number: int, canvas: int) -> list[list[int]]:
        """Per KV head, the positions that queries of a layer attend to in this forward pass."""
        return [list(range(canvas))] * self.kv_heads

    def after_layer(self, number: int, q: torch.Tensor, cache: LayerCache) -> None:
        """Called when a layer is done, with the queries of the whole canvas."""

    def project(self, layer: LayerWeights, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys (both rotated) and values ``[canvas, heads, head size]`` of the normed states of a canvas."""

        def heads(weight: torch.Tensor, bias: torch.Tensor | None, count: int) -> torch.Tensor:
            out = y @ weight.T
            return (out if bias is None else out + bias).view(len(y), count, -1)

        q = heads(layer.q, layer.q_bias, self.heads)
        k = heads(layer.k, layer.k_bias, self.kv_heads)
        return self._rotate(q), self._rotate(k), heads(layer.v, layer.v_bias, self.kv_heads)

    def _pick(self, number: int, fresh: torch.Tensor, cached: torch.Tensor) -> list[int]:
        picked = v_verify(fresh, cached, int(len(fresh) * self.update_ratio))
        positions = [self.prompt_length + row for row in picked.rows]
        self.updated.setdefault(self.forwards, {})[number] = positions
        if picked.gap == 0:
            self.similarity_ties += 1
        else:
            self.closest_similarity = min(self.closest_similarity, picked.gap)
        return positions

    def _attend(self, q: torch.Tensor, cache: LayerCache, visible: list[list[int]]) -> torch.Tensor:
        outs = []
        for h in range(self.heads):
            g = h * self.kv_heads // self.heads
            k, v = cache.k[visible[g], g], cache.v[visible[g], g]
            outs.append((q[:, h] @ k.T / math.sqrt(q.shape[-1])).softmax(-1) @ v)
        return torch.cat(outs, dim=-1)


def plain_dllm_cache(
    model: PlainModel,
    prompt_ids: list[int],
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    prompt_refresh_interval: int,
    response_refresh_interval: int,
    update_ratio: float,
    unmasking: str = "low_confidence",
    first_layer_always: bool = True,
    adapt_beside_prompt: bool = True,
    threshold: float | None = None,
) -> dict[str, Any]:
    """Decode with dLLM-Cache.

    ``first_layer_always``: the authors' code refreshes the whole first layer in every forward pass; the paper does not
    say so. ``adapt_beside_prompt``: their code also updates the response adaptively when only the prompt is due; the
    paper reuses the response then.

    The result: ``tokens`` of the response; ``order``, canvas positions unmasked per forward pass; ``updated``, canvas
    positions recomputed by adaptive updates, by forward pass (from 1) and layer (from 0); and how close the decisions
    were: ``closest`` (relative, of tokens and confidences), ``closest_similarity`` (absolute, at the edge of an
    adaptive update) and ``similarity_ties`` (adaptive updates whose edge fell among equals).
    """
    cached = DllmCacheModel(
        model,
        len(prompt_ids),
        prompt_refresh_interval=prompt_refresh_interval,
        response_refresh_interval=response_refresh_interval,
        update_ratio=update_ratio,
        first_layer_always=first_layer_always,
        adapt_beside_prompt=adapt_beside_prompt,
        count_tokens=threshold is not None,
    )
    return run(
        cached,
        prompt_ids,
        gen_length=gen_length,
        block_length=block_length,
        steps=steps,
        unmasking=unmasking,
        threshold=threshold,
    )


def run(
    cached: DllmCacheModel,
    prompt_ids: list[int],
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    unmasking: str,
    threshold: float | None = None,
) -> dict[str, Any]:
    """Decode with a model that keeps caches; the sampler is the one without a cache (for Dream with its block rule)."""
    decoded = decode(
        cached,
        prompt_ids,
        gen_length=gen_length,
        block_length=block_length,
        steps=steps,
        unmasking=unmasking,
        threshold=threshold,
    )
    return {
        "tokens": decoded.tokens,
        "order": decoded.order,
        "updated": cached.updated,
        "closest": decoded.closest,
        "closest_similarity": cached.closest_similarity,
        "similarity_ties": cached.similarity_ties,
    }
