"""Decoding without a cache, block diffusion, and Fast-dLLM's prefix and dual caches, as slow, plain PyTorch.

The cache of block diffusion is exact, so that it shows in what is fed alone: each block is fed once more, with the
first pass of the next.

With a cache every window starts with a pass over the whole canvas. Later passes of the window compute it and all
behind it (``prefix``) or the window alone (``dual``); they read everything else as that first pass left it. The
authors' code makes one more pass of a block that its first pass completed; here a block ends when it holds no mask.

``dual`` may refresh less than the canvas: see ``refreshes.py``. Where a refresh computes what is near, everything is
read as the last pass left it that computed it, a finished block too, but for what SlowFast sampling cuts.
"""

from typing import Any

from tests.oracles.buffer import Buffer
from tests.oracles.decoding import Decoding
from tests.oracles.refreshes import Refreshes


def plain_none(run: Decoding) -> None:
    for _ in run.passes():
        seen = run.seen
        if run.by_blocks:
            logits = run.model.logits(run.canvas[: len(seen)], run.block_length)
        else:
            logits = Buffer(run).forward(seen, seen)
        run.fill(logits, seen)


def plain_block(run: Decoding) -> None:
    kept = 0
    for step in run.passes():
        start, stop = run.window[0] - run.window[0] % run.block_length, run.window[1]
        run.fill(run.model.logits(run.canvas[:stop], run.block_length), range(start if step else kept, stop))
        kept = start


def plain_prefix(run: Decoding) -> None:
    run.window_alone = True
    buffer = Buffer(run)
    for step in run.passes():
        rows = run.seen if step == 0 else run.seen[run.window[0] :]
        run.fill(buffer.forward(rows, run.seen), rows)


def plain_dual(run: Decoding, **options: Any) -> None:
    run.window_alone = True
    buffer, refreshes = Buffer(run), Refreshes(run, **options)
    kept: list[int] = []
    retained: list[int] = []
    for step in run.passes():
        window = list(range(*run.window))
        if step > 0:
            rows, read = [p for p in window if p < run.cut], retained
        elif refreshes.whole_is_due(0):
            rows = read = run.seen
            kept = refreshes.never_renewed()
            retained = sorted({*kept, *refreshes.renewed()} - {*window})
        else:
            rows = refreshes.renewed()
            read = kept
            retained = sorted({*kept, *rows} - {*window})
        if refreshes.refresh == "near":
            read = run.seen
        run.fill(buffer.forward(rows, sorted({*read, *rows})), rows)
