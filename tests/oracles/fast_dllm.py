"""Decoding without a cache, and Fast-dLLM's prefix and dual caches, as slow, plain PyTorch.

With a cache every window starts with a pass over the whole canvas. Later passes of the window compute it and all
behind it (``prefix``) or the window alone (``dual``); they read everything else as that first pass left it. The
authors' code makes one more pass of a block that its first pass completed; here a block ends when it holds no mask.
"""

from tests.oracles.buffer import Buffer
from tests.oracles.decoding import Decoding


def plain_none(run: Decoding) -> None:
    for _ in run.passes():
        run.fill(run.model.logits(run.canvas), range(run.length))


def plain_prefix(run: Decoding) -> None:
    plain_cached(run, whole_suffix=True)


def plain_dual(run: Decoding) -> None:
    plain_cached(run, whole_suffix=False)


def plain_cached(run: Decoding, *, whole_suffix: bool) -> None:
    run.window_alone = True
    buffer = Buffer(run.model, run.length)
    for step in run.passes():
        first, end = run.window
        rows = range(run.length) if step == 0 else range(first, run.length if whole_suffix else end)
        run.fill(buffer.forward(run.canvas, rows)[0], rows)
