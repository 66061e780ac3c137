"""The kernels that a forward pass launches, and what each of them costs on a GPU.

A kernel takes as long as its bytes or its FLOPs, whichever is longer, at the rates that published measurements reached.
Attention counts waves: its programs run side by side on the multiprocessors, and a last wave of few takes as long as a
full one.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from dllm_engine.bench.floor import PassShape
from dllm_engine.kernels.triton.tiles import splits_by_rule, tiles_by_rule
from dllm_engine.memory.weights import VOCABULARY_PADDING, attention_matrices, mlp_matrices
from dllm_engine.model_executor.token_prediction import head_chunks
from dllm_engine.scheduler.page_layout import head_dim_of
from dllm_engine.speed.gpus import GPU, TILE_HEAD_DIM, programs_at_once

BANDWIDTH_SHARE = 1700 / 2039
"""Of a GPU's bandwidth, the peak seen on an A100 (in GB/s): README of gpt-fast (PyTorch Labs, 2023). Assumed of all
GPUs."""
MATMUL_SHARE = 794.5 / 989
"""Of the tensor cores' FLOP/s, the most that PyTorch's matrix products reach on an H100 or H200 in bfloat16: "Maximum
Achievable Matmul FLOPS" in Stas Bekman's "Machine Learning Engineering". The same table has 0.87 for an A100."""
DENSE_SHARE, DENSE_WAVE = 0.637, 3.1e-6
"""FlashAttention-3: the share of the tensor cores' FLOP/s, and seconds that a wave takes beside. Fitted, to within 1 %,
to the TFLOP/s that PyTorch's benchmark suite published for 512 to 16,384 tokens and heads of 128
(github.com/pytorch/benchmark, change 2391; its GPU, a Hopper, is taken to be an H100). Assumed of the FlashAttention-2
of other GPUs."""
PAGED_SHARE, PAGED_WAVE = 0.490, 4.2e-6
"""The same of Triton's own attention kernel, from the same table. Assumed of ``paged_attention``."""
SMALL_TILE_SHARE = 0.35
"""Tiles of fewer than 64 rows cannot use Hopper's instructions for 64. FlashAttention-2, which uses none of them,
reaches this share on an H100 (arXiv 2407.08608, abstract)."""
DENSE_TILE = 128
"""Rows of a program of FlashAttention with heads of 128; one program runs on a multiprocessor at a time."""
ROUTING_LAUNCHES = 7
"""Kernels of a layer with experts that only decide and sort: softmax, top k, the type of the ids, three that group rows
by expert, the sum over a row's experts. Counted in vLLM's code."""
NORM_OF_HEADS_LAUNCHES = 3
"""The norm of all heads, the weights of queries, and those of keys."""
_WARPGROUP_ROWS = 64
_FLOAT32, _TOKEN = 4, 8  # bytes


@dataclass(frozen=True)
class Kernel:
    """One launch."""

    bytes: float
    """Read and written."""
    required: float = 0.0
    """How many of them no implementation can leave out: weights, keys and values."""
    flops: float = 0.0
    """Of matrix products."""
    share: float = MATMUL_SHARE
    """Of the tensor cores' FLOP/s."""
    stretch: float = 1.0
    """Its work's time over that of multiprocessors which are all busy to the end."""
    beside: float = 0.0
    """Seconds beside its work."""

    def floor(self, gpu: GPU) -> float:
        """Seconds that the required work takes at the GPU's peaks."""
        return max(self.required / gpu.bandwidth, self.flops / gpu.flops)

    def seconds(self, gpu: GPU) -> float:
        """As predicted."""
        work = max(self.bytes / (gpu.bandwidth * BANDWIDTH_SHARE), self.flops / (gpu.flops * self.share))
        return work * self.stretch + self.beside


def in_waves(gpu: GPU, programs: int, at_once: int, wave: float) -> dict[str, float]:
    """``stretch`` and ``beside`` of a kernel of equal programs, of which a multiprocessor runs ``at_once``.

    The multiprocessor with the most programs ends last. ``wave``: seconds that each round of programs takes beside.
    """
    most = -(-programs // gpu.multiprocessors)
    return {"stretch": most * gpu.multiprocessors / programs, "beside": -(-most // at_once) * wave}


@dataclass(frozen=True)
class Decoder:
    """A model on one GPU."""

    config: Any
    number_bytes: int
    """Of a weight or an activation."""

    @property
    def head_dim(self) -> int:
        return head_dim_of(self.config)

    def layer(self, shape: PassShape, gpu: GPU, of_method: int, written: int, experts: Any = None) -> list[Kernel]:
        """Of one layer, in a pass of requests that are alike.

        ``of_method``: kernels that are launched for the cache method; each reads and writes keys or values of as many
        tokens as are ``written`` to pages. ``experts``: the ``ExpertShape`` of the layer, None for one with an MLP.
        """
        config, size, rows = self.config, self.number_bytes, shape.num_rows
        stream = rows * config.hidden_size * size
        rotated = rows * (config.num_attention_heads + config.num_key_value_heads) * self.head_dim * size
        qkv, out = (self._matrix(rows, *matrix) for matrix in attention_matrices(config, 1))
        norm = Kernel(4 * stream)  # reads the stream and what is added to it, writes the sum and its norm
        of_heads = [Kernel(rotated)] * NORM_OF_HEADS_LAUNCHES if getattr(config, "qk_layernorm", False) else []
        attention = [*of_heads, Kernel(2 * rotated), *self._attention(shape, gpu)]
        pages = [Kernel(2 * written * self._token_bytes)] * of_method
        mlp = self._mlp(rows, config.intermediate_size) if experts is None else self._experts(rows, experts)
        return [norm, qkv, *attention, *pages, out, norm, *mlp]

    def _mlp(self, rows: int, width: int) -> list[Kernel]:
        gate_up, down = (self._matrix(rows, *matrix) for matrix in mlp_matrices(self.config.hidden_size, width, 1))
        return [gate_up, Kernel(3 * rows * width * self.number_bytes), down]

    def _experts(self, rows: int, experts: Any) -> list[Kernel]:
        """The router takes each expert equally often, so that a few rows already read the weights of most."""
        hidden, size = self.config.hidden_size, self.number_bytes
        router = self._matrix(rows, hidden, experts.num_experts)
        chosen = rows * experts.top_k
        read = experts.num_experts * (1 - (1 - experts.top_k / experts.num_experts) ** rows)
        grouped = []
        for inputs, outputs in mlp_matrices(hidden, experts.intermediate_size, 1):
            weights = read * inputs * outputs * size
            grouped.append(Kernel(weights + chosen * (inputs + outputs) * size, weights, 2 * chosen * inputs * outputs))
        gate_up, down = grouped
        activation = Kernel(3 * chosen * experts.intermediate_size * size)
        deciding = [Kernel(chosen * hidden * size / ROUTING_LAUNCHES)] * ROUTING_LAUNCHES
        shared = self._mlp(rows, experts.shared_intermediate_size) if experts.shared_intermediate_size else []
        return [router, *deciding, gate_up, activation, down, *shared]

    def ends(self, shape: PassShape) -> list[Kernel]:
        """Tokens of the rows, their embedding, and what makes tokens and confidences of the rows that predict any."""
        config, size = self.config, self.number_bytes
        stream, of_head = (rows * config.hidden_size * size for rows in (shape.num_rows, shape.head_rows))
        # Tokens, their embedding, what the last layer adds, and the rows that predict.
        kernels = [Kernel(2 * shape.num_rows * _TOKEN), Kernel(2 * stream), Kernel(3 * stream), Kernel(2 * of_head)]
        vocab_size = -(-config.vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING
        for number, chunk in enumerate(head_chunks(shape.head_rows, config.vocab_size, torch.device("cuda"))):
            rows = min(chunk.stop, shape.head_rows) - chunk.start
            # One read of the weights is required, however many chunks there are.
            head = self._matrix(rows, config.hidden_size, vocab_size, required=number == 0)
            # The norm; the head; statistics of parts of the vocabulary, and of all of it.
            kernels += [Kernel(2 * rows * config.hidden_size * size), head]
            kernels += [Kernel(rows * vocab_size * size), Kernel(rows * _FLOAT32)]
        return kernels

    @property
    def _token_bytes(self) -> int:
        """Of a token's keys, or of its values, in one layer."""
        size: int = self.config.num_key_value_heads * self.head_dim * self.number_bytes
        return size

    def _matrix(self, rows: int, inputs: int, outputs: int, required: bool = True) -> Kernel:
        weight = inputs * outputs * self.number_bytes
        activations = rows * (inputs + outputs) * self.number_bytes
        return Kernel(weight + activations, weight if required else 0, 2 * rows * inputs * outputs)

    def _attention(self, shape: PassShape, gpu: GPU) -> list[Kernel]:
        (rows, keys), *_ = shape.requests
        num_requests, heads = len(shape.requests), self.config.num_attention_heads
        kv_heads = self.config.num_key_value_heads
        numbers = num_requests * rows * heads * self.head_dim
        retained = 2 * num_requests * keys * self._token_bytes
        flops = 4.0 * numbers * keys
        if rows == keys:  # nothing is in pages
            tiles = math.ceil(rows / DENSE_TILE)
            padding = rows / (tiles * DENSE_TILE)
            read_written = 2 * numbers * self.number_bytes + retained
            waves = in_waves(gpu, num_requests * tiles * heads, 1, DENSE_WAVE)
            return [Kernel(read_written, retained, flops, DENSE_SHARE * padding, **waves)]
        pairs = rows * heads // kv_heads
        block = tiles_by_rule(pairs, TILE_HEAD_DIM, torch.bfloat16).block_q
        tiles = math.ceil(pairs / block)
        padding = pairs / (tiles * block)
        splits = splits_by_rule(num_requests * tiles * kv_heads, keys, gpu.multiprocessors)
        share = (PAGED_SHARE if block >= _WARPGROUP_ROWS else SMALL_TILE_SHARE) * padding
        waves = in_waves(gpu, num_requests * tiles * kv_heads * splits, programs_at_once(gpu, block), PAGED_WAVE)
        out = numbers * self.number_bytes
        parts = splits * numbers * _FLOAT32 if splits > 1 else 0
        attention = Kernel(out + retained + (parts or out), retained, flops, share, **waves)
        return [attention, Kernel(parts + out)] if splits > 1 else [attention]
