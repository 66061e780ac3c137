"""Sparse-dLLM as slow, plain PyTorch.

Within a block: ``update_delay`` passes over the whole canvas, one more that also selects what each layer retains, then
passes over the block alone, which read the retained positions, as that one left them, and the block.
"""

import torch

from tests.oracles.buffer import Buffer
from tests.oracles.decoding import Decoding, gap


def plain_sparse(
    run: Decoding,
    *,
    retention_ratio: float = 0.5,
    pool_kernel_size: int = 3,
    update_delay: int = 1,
    scope: str = "bidirectional",
) -> None:
    run.window_alone = True
    buffer = Buffer(run.model, run.length)
    retained_by_block = run.traces["retained_positions"] = []
    for step in run.passes():
        first, end = run.window
        block, behind = list(range(first, end)), list(range(end, run.length))
        if step > update_delay:
            logits, _ = buffer.forward(run.canvas, block, [kept + block for kept in retained_by_block[-1]])
            run.fill(logits, block)
            continue
        logits, queries = buffer.forward(run.canvas, range(run.length))
        if step == update_delay:
            candidates, always = (range(first), behind) if scope == "prefix" else ([*range(first), *behind], [])
            retained_by_block.append(
                [
                    select(run, q[block], keys, list(candidates), retention_ratio, pool_kernel_size) + always
                    for keys, q in zip(buffer.k, queries, strict=True)
                ]
            )
        run.fill(logits, range(run.length))


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
