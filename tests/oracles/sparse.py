"""Sparse-dLLM as slow, plain PyTorch.

Where a refresh computes less than the canvas (``Refreshes``), what only whole refreshes
compute and the rest are two sets of candidates. The first gives its share of them,
rounded down, when the whole canvas is computed; the second what is missing to the share
of both.
"""

from typing import Any

import torch

from tests.oracles.buffer import Buffer
from tests.oracles.by_rows import Refreshes
from tests.oracles.decoding import Decoding
from tests.oracles.maskkv import pooled, voters_of, votes_of


def plain_sparse(
    run: Decoding,
    *,
    retention_ratio: float = 0.5,
    pool_kernel_size: int = 3,
    update_delay: int = 1,
    scope: str = "bidirectional",
    scorer: str = "mean_query",
    observation_window: int = 32,
    **options: Any,
) -> None:
    run.window_alone = True
    buffer = Buffer.of(run)
    refreshes = Refreshes(run, **options)
    num_layers = len(run.model.layers)
    retained_by_block = run.traces["retained_positions"] = []
    kept: list[list[int]] = [[]] * num_layers
    due = True
    for step in run.passes():
        block = list(range(*run.window))
        if step > update_delay:
            block = [p for p in block if p < run.cut]
            run.fill(
                buffer.forward(
                    block, *(sorted(k + block) for k in retained_by_block[-1])
                ),
                block,
            )
            continue
        if step == update_delay:
            run.cut = run.length
        if step == 0:
            due = refreshes.whole_is_due(update_delay)
        if due:
            rows, kept = run.seen, [[]] * num_layers
        else:
            rows = refreshes.renewed()
        logits = buffer.forward(rows, *(sorted({*k, *rows}) for k in kept))
        rows = buffer.rows
        if step == update_delay:
            old = refreshes.never_renewed()
            new = [p for p in refreshes.renewed() if p not in block]
            behind = block[-1] if scope == "prefix" else run.length
            candidates = [[p for p in part if p < behind] for part in (old, new)]
            always = [p for p in (old if due else []) + new if p > behind]
            of_old = int(len(candidates[0]) * retention_ratio)
            of_new = int(len(candidates[0] + candidates[1]) * retention_ratio) - of_old
            retained = []
            for number, (keys, q) in enumerate(
                zip(buffer.k, buffer.queries, strict=True)
            ):
                of_block = q[[list(rows).index(p) for p in block]]
                votes = None
                if scorer != "mean_query":  # such methods compute the whole canvas
                    votes = votes_of(
                        q[voters_of(scorer, run, observation_window)],
                        keys[rows],
                        len(rows),
                    ).mean(0)
                if due:
                    chosen = select(
                        run,
                        of_block,
                        keys,
                        candidates[0],
                        of_old,
                        pool_kernel_size,
                        votes,
                    )
                    kept[number : number + 1] = [
                        sorted(chosen + [p for p in old if p > behind])
                    ]
                chosen = select(
                    run, of_block, keys, candidates[1], of_new, pool_kernel_size, votes
                )
                retained.append(sorted({*kept[number], *chosen, *always}))
            retained_by_block.append(retained)
        run.fill(logits, rows)


def select(
    run: Decoding,
    queries: torch.Tensor,
    keys: torch.Tensor,
    candidates: list[int],
    count: int,
    kernel_size: int,
    votes: torch.Tensor | None = None,
) -> list[int]:
    """The ``count`` candidates that a layer retains, by the mean of ``queries`` ``[row,
    head, element]`` or by ``votes``, ascending."""
    floor = 1.0 if votes is None else 1e-2
    if votes is None:
        by_head = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
        votes = (by_head * queries.mean(0)).sum(-1).mean(-1)
    scores = dict(
        zip(candidates, pooled(votes[candidates].tolist(), kernel_size), strict=True)
    )
    return sorted(run.largest(scores, count, floor))
