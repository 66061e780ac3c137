"""The floor of a forward pass: the work that no implementation of it can leave out.

It is the linear layers, one call of attention per layer and group of equal requests,
and the head on the masked rows, at the pass's shapes: on the model's own weights, with
the same threads, in the same process, from inputs that lie ready. Experts run with
their router, which says whose weights are read. Keys and values are different tensors,
and each layer reads its own, as it must in any implementation. Norms, RoPE, page
tables, choosing what is retained, and everything around the model are not in it.
"""

from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timing import seconds_of

from dllm_engine.decoding.step_plan import StepPlan
from dllm_engine.model_executor.models.decoder import DecoderLayer, DiffusionDecoder
from dllm_engine.model_executor.models.mlp import GatedMLP

_KV_BYTES = 256 << 20
"""Keys and values that a floor makes at most, well beyond a cache; beyond it layers
take turns with the same ones.
"""


@dataclass(frozen=True)
class PassShape:
    """Sizes that the floor of a forward pass depends on."""

    requests: tuple[tuple[int, int], ...]
    """(rows, keys) of each request, sorted: the rows computed per layer, and what each
    of them attends to.
    """
    head_rows: int
    """Masked rows that go through the head, of all requests together."""

    @property
    def num_rows(self) -> int:
        return sum(rows for rows, _ in self.requests)


def attended_keys(
    plan: StepPlan, rows: int, canvas_length: int, block_length: int | None = None
) -> int:
    """Tokens that each row of a step attends to; where attention goes by blocks, a mean
    over the rows. ``canvas_length``: without what a pass of the window leaves out behind
    it."""
    if block_length is not None:
        num_blocks = -(-rows // block_length)
        return plan.read + (num_blocks + 1) * block_length // 2
    keeps_all = plan.retained >= canvas_length
    if keeps_all or plan.read + plan.max_rows > canvas_length:
        # The rows' own keys are among those in pages.
        return min(plan.read, plan.retained)
    return min(plan.read + rows, canvas_length)


class Floor:
    """The floor of one pass shape on a model; inputs are made once."""

    def __init__(self, model: DiffusionDecoder, shape: PassShape) -> None:
        self.model = model
        size, weight = model.config, model.final_norm.weight
        layer = model.layers[0]
        assert isinstance(layer, DecoderLayer)

        def numbers(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, dtype=weight.dtype, device=weight.device)

        self._x = numbers(shape.num_rows, size.hidden_size)
        self._attended = numbers(shape.num_rows, layer.num_heads * layer.head_dim)
        self._gated = numbers(
            shape.num_rows,
            size.intermediate_size * layer.num_heads // size.num_attention_heads,
        )
        self._masked = self._x[: shape.head_rows]
        # Query heads that share a KV head are further rows of it, so that its keys are
        # read once.
        kv_heads, sharing = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
        groups = Counter(shape.requests).items()
        num_keys = sum(keys * count for (_, keys), count in groups)
        kv_bytes = 2 * num_keys * kv_heads * layer.head_dim * weight.element_size()
        different = min(size.num_hidden_layers, max(1, _KV_BYTES // max(kv_bytes, 1)))
        queries = [
            numbers(count, kv_heads, sharing * rows, layer.head_dim)
            for (rows, _), count in groups
        ]
        keys_and_values = [
            [
                numbers(2, count, kv_heads, keys, layer.head_dim)
                for (_, keys), count in groups
            ]
            for _ in range(different)
        ]
        self._heads = [
            list(zip(queries, keys_and_values[i % different], strict=True))
            for i in range(size.num_hidden_layers)
        ]

    @torch.inference_mode()
    def run(self) -> None:
        with self.model.forward_context(
            torch.arange(len(self._x), device=self._x.device)
        ):
            self._run_layers()
        head = self.model.lm_head
        if self._masked.numel():
            head.quant_method.apply(head, self._masked)

    def _run_layers(self) -> None:
        for layer, heads in zip(self.model.layers, self._heads, strict=True):
            assert isinstance(layer, DecoderLayer)
            layer.qkv_proj(self._x)
            for q, (k, v) in heads:
                F.scaled_dot_product_attention(q, k, v)
            layer.out_proj(self._attended)
            if isinstance(layer.mlp, GatedMLP):
                layer.mlp.gate_up_proj(self._x)
                layer.mlp.down_proj(self._gated)
            else:
                layer.mlp(self._x)

    def seconds(self) -> float:
        """Seconds of one pass, after one that is not counted."""
        self.run()
        return seconds_of(self.run)
