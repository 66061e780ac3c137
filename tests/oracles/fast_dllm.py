"""Decoding without a cache, block diffusion, and Fast-dLLM's prefix and dual caches, as slow, plain PyTorch.

The cache of block diffusion is exact, so that it shows in what is fed alone: each block is fed once more, with the
first pass of the next.

With a cache every window starts with a pass over the whole canvas, unless ``dual`` refreshes less. Later passes of the
window read everything else as that first pass left it. Where a refresh computes what is near, everything is read as the
last pass left it that computed it, a finished block too, but for what SlowFast sampling cuts.
"""

from dataclasses import dataclass
from typing import Any

from tests.oracles.buffer import Buffer
from tests.oracles.decoding import Decoding


@dataclass
class Refreshes:
    """Which refreshes compute the whole canvas, and what the others compute; no paper has this.

    The whole canvas is computed for a window unless it and the one before lie in the same interval of blocks and that
    one had got as far as to retain something.
    """

    run: Decoding
    refresh: str = "all"
    prompt_refresh_interval: int = 4
    near_tokens: int = 32

    def whole_is_due(self, update_delay: int) -> bool:
        run = self.run
        if self.refresh == "all" or not run.running_before or run.steps_before <= update_delay:
            return True
        interval = run.running[-1] // self.prompt_refresh_interval
        return run.running_before[0] // self.prompt_refresh_interval != interval

    def renewed(self) -> list[int]:
        """What every refresh computes, ascending."""
        run, end = self.run, self.run.length
        if self.refresh == "near":
            start = run.window[0] - self.near_tokens
            end = run.window[1] + self.near_tokens if run.suffix_blocks is None else end
        else:
            start = 0 if self.refresh == "all" else len(run.prompt) - run.model.is_dream
        return [position for position in run.seen if start <= position < end]

    def never_renewed(self) -> list[int]:
        """What only passes over the whole canvas compute, without the window."""
        return [p for p in range(self.renewed()[0]) if not self.run.window[0] <= p < self.run.window[1]]


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
        else:
            rows, read = refreshes.renewed(), kept
        if step == 0:
            retained = sorted({*kept, *refreshes.renewed()} - {*window})
        if refreshes.refresh == "near":
            read = run.seen
        run.fill(buffer.forward(rows, sorted({*read, *rows})), rows)
