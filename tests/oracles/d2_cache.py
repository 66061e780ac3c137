"""d2Cache as slow, plain PyTorch: a pass computes what the one before chose by
confidence, nearness and rollout.
"""

from itertools import pairwise
from typing import Literal

import torch

from tests.oracles.buffer import Buffer
from tests.oracles.decoding import Decoding, gap
from tests.oracles.models import attention_weights


def plain_d2_cache(
    run: Decoding,
    *,
    rollout_p: float = 0.1,
    masked_rows: int = 32,
    sigma: float = 10.0,
    gap_fill: int = 0,
    confidence: Literal["first", "latest"] = "first",
    range_unit: Literal["masks", "block"] = "masks",
) -> None:
    buffer = Buffer(run)
    run.fills_computed = run.predicts_window = True
    everything = list(range(run.length))
    start = len(run.prompt)
    dream = run.model.is_dream
    response = range(start, run.length)
    confidences: dict[int, float] = {}
    masked_before: list[int] = []
    window = (0, 0)
    importance: list[float] = []
    for _ in run.passes():
        masked = run.masked(start, run.length)
        if not run.order:
            rows = everything
        else:
            density = run.density(sigma)
            scores = {p: confidences.get(p, 0.0) * density[p - start] for p in response}
            first, end = window
            if run.block_add_threshold is not None:
                first, end = next(
                    block for block in run.blocks if block[0] <= masked[0] < block[1]
                )
            preferred = [
                p
                for p in range(first, end)
                if range_unit == "block" or p in masked_before
            ]
            best = max(scores.values())
            scores |= {p: scores[p] + best for p in preferred}
            unit = run.block_length if range_unit == "block" else len(preferred)
            last = (
                masked[masked_rows - 1] - start
                if len(masked) >= masked_rows
                else run.gen_length - 1
            )
            stop = start + (last // unit + 1) * unit
            always = masked[:1] if run.delay_eos or run.slow_fast is not None else []
            others = {
                p: scores[p]
                for p in masked
                if preferred[0] <= p < stop and p not in always
            }
            wanted = always + run.largest(others, masked_rows - len(always))
            of_first = (
                {start - 1} if dream else set()
            )  # the row that predicts the response's first token
            predicting = {p - dream for p in wanted}
            chosen = set(run.order[-1]) | predicting - of_first
            chosen |= important(
                run, importance, [p for p in everything if p not in chosen], rollout_p
            )
            chosen = chosen - of_first | predicting
            rows = sorted(chosen)
            for a, b in pairwise(rows):
                if b - a <= gap_fill:
                    chosen |= set(range(a, b))
            rows = sorted(chosen)
        run.predict(buffer.forward(rows, everything), rows)
        importance = column_sums(run, buffer, rows)
        window, masked_before = run.window, masked
        for p in masked if not run.order or confidence == "latest" else ():
            if p - dream in rows:
                confidences[p] = run.measured(p)
        run.choose()


def column_sums(run: Decoding, buffer: Buffer, rows: list[int]) -> list[float]:
    """Of the attention rolled out over the layers, a whole matrix at a time."""
    rollout = torch.eye(run.length, dtype=torch.float64)
    for layer, q in enumerate(buffer.queries):
        attention = torch.eye(run.length, dtype=torch.float64)
        attention[rows] = 0
        for head in range(run.model.heads):
            attention[rows] += (
                attention_weights(q, buffer.k[layer], head).double() / run.model.heads
            )
        rollout = (attention + torch.eye(run.length)) / 2 @ rollout
    return rollout.sum(0).tolist()


def important(
    run: Decoding, importance: list[float], others: list[int], share: float
) -> set[int]:
    """The positions with the largest sums, up to a share of all their sums; one at
    least, if there is any.
    """
    ordered = sorted(others, key=lambda p: -importance[p])
    total, so_far, taken = sum(importance[p] for p in others), 0.0, 0
    for p in ordered:
        so_far += importance[p]
        if share < 1:
            run.decided(10 * gap(so_far / total, share))
        if so_far > share * total * (1 + 1e-12):
            break
        taken += 1
    taken = max(taken, 1)
    if len(ordered) > taken:
        run.decided(
            10 * gap(importance[ordered[taken - 1]], importance[ordered[taken]])
        )
    return set(ordered[:taken])
