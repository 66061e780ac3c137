"""Sparse-dLLM as slow, plain PyTorch.

Within a block: ``update_delay`` passes over the whole canvas, one more that also selects what each layer retains, then
passes over the block alone, which read the retained positions, as that one left them, and the block.
"""

from typing import Any

import torch

from tests.oracles.buffer import Buffer
from tests.oracles.models import PlainModel
from tests.oracles.unmasking import Decoding, gap


def plain_sparse(
    model: PlainModel,
    prompt: list[int],
    *,
    retention_ratio: float = 0.5,
    pool_kernel_size: int = 3,
    update_delay: int = 1,
    scope: str = "bidirectional",
    **asked: Any,
) -> Decoding:
    """Decode; ``asked`` are fields of ``Decoding``."""
    run = Decoding(model, prompt, **asked)
    buffer = Buffer(model, run.length)
    retained_by_block: list[list[list[int]]] = []
    run.traces["retained_positions"] = retained_by_block
    for number, (first, end) in enumerate(run.blocks):
        block = list(range(first, end))
        before, behind = list(range(first)), list(range(end, run.length))
        retained: list[list[int]] = []
        step = 0
        while run.masked(first, end):
            if step <= update_delay:
                rows = list(range(run.length))
                logits, queries = buffer.forward(run.canvas, rows)
                if step == update_delay:
                    for keys, q in zip(buffer.k, queries, strict=True):
                        if scope == "prefix":
                            kept = select(run, q[block], keys, before, retention_ratio, pool_kernel_size) + behind
                        else:
                            kept = select(run, q[block], keys, before + behind, retention_ratio, pool_kernel_size)
                        retained.append(kept)
                    retained_by_block.append(retained)
            else:
                rows = block
                logits, _ = buffer.forward(run.canvas, rows, [kept + block for kept in retained])
            run.computed.append(rows)
            run.fill(logits, number, step)
            step += 1
    return run


def select(
    run: Decoding, queries: torch.Tensor, keys: torch.Tensor, candidates: list[int], ratio: float, kernel_size: int
) -> list[int]:
    """The candidates that a layer retains, by the mean of ``queries`` ``[row, head, element]``, ascending."""
    mean_query, num_heads = queries.mean(0), queries.shape[1]
    importance = []
    for j in candidates:
        scores = [float(mean_query[h] @ keys[j, h * keys.shape[1] // num_heads]) for h in range(num_heads)]
        importance.append(sum(scores) / num_heads)
    reach = kernel_size // 2
    pooled = [max(importance[max(i - reach, 0) : i + reach + 1]) for i in range(len(importance))]
    count = int(len(candidates) * ratio)
    by_score = sorted(range(len(candidates)), key=lambda i: (-pooled[i], i))
    if 0 < count < len(candidates):
        run.decided(gap(pooled[by_score[count - 1]], pooled[by_score[count]], floor=1.0))
    return sorted(candidates[i] for i in by_score[:count])
