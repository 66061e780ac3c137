"""Methods that are a choice of the rows to compute and to read (see ``Buffer``), as
slow, plain PyTorch: none, block diffusion, Fast-dLLM's prefix and dual caches,
dKV-Cache, FreeCache and d3LLM's cache.

The cache of block diffusion is exact, so that it shows in what is fed alone: each block
is fed once more, with the first pass of the next.

With Fast-dLLM's caches every window starts with a pass over the whole canvas, unless
``dual`` refreshes less. Later passes of the window read everything else as that first
pass left it. Where a refresh computes what is near, everything is read as the last pass
left it that computed it, a finished block too, but for what SlowFast sampling cuts.
"""

from dataclasses import dataclass
from typing import Any

from tests.oracles.buffer import Buffer
from tests.oracles.decoding import Decoding


@dataclass
class Refreshes:
    """Which refreshes compute the whole canvas, and what the others compute; no paper
    has this.

    The whole canvas is computed for a window unless it and the one before lie in the
    same interval of blocks and that one had got as far as to retain something.
    """

    run: Decoding
    refresh: str = "all"
    prompt_refresh_interval: int = 4
    near_tokens: int = 32

    def whole_is_due(self, update_delay: int) -> bool:
        run = self.run
        if (
            self.refresh == "all"
            or not run.running_before
            or run.steps_before <= update_delay
        ):
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
        return [
            p
            for p in range(self.renewed()[0])
            if not self.run.window[0] <= p < self.run.window[1]
        ]


def plain_none(run: Decoding) -> None:
    buffer = Buffer.of(run)
    for _ in run.passes():
        seen = run.seen
        if run.by_blocks:
            logits, seen = run.logits_by_blocks(), list(range(run.attended[1]))
        else:
            logits = buffer.forward(seen, seen)
        run.fill(logits, seen)


def plain_block(run: Decoding, *, sub_block_cache: bool = False) -> None:
    if sub_block_cache:
        in_parts(run)
        return
    kept = 0
    for _ in run.passes():
        run.fill(run.logits_by_blocks(), run.seen[kept:])
        kept, _ = run.attended


def in_parts(run: Decoding) -> None:
    """Fast-dLLM v2's block cache: a pass computes a part of the running block alone once
    the block has been computed and the first position of the part is known."""
    buffer, kept, computed = Buffer(run), 0, -1
    for _ in run.passes():
        start, stop = run.attended
        rows = list(range(start, stop))
        if computed == start and not run.masked(run.window[0], run.window[0] + 1):
            rows = list(range(*run.window))
        finished = list(range(kept, start))
        logits = buffer.store(kept, start)
        if run.is_seeded:
            rows = []
        else:
            logits, computed = buffer.forward(rows, range(stop)), start
        run.fill(logits, [*finished, *rows])
        kept = start


def plain_prefix(run: Decoding) -> None:
    run.window_alone = True
    buffer = Buffer.of(run)
    for step in run.passes():
        rows = run.seen if step == 0 else run.seen[run.window[0] :]
        run.fill(buffer.forward(rows, run.seen), rows)


def plain_dual(run: Decoding, **options: Any) -> None:
    run.window_alone = True
    buffer, refreshes = Buffer.of(run), Refreshes(run, **options)
    kept: list[int] = []
    retained: list[int] = []
    for step in run.passes():
        window = list(range(*run.window))
        if step > 0:
            rows = [p for p in window if p < run.cut]
            read = retained
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


def plain_dkv(run: Decoding, *, refresh_interval: int = 8) -> None:
    """dKV-Cache-Decode.

    LLaDA: steps 0 and 1 of a block and every ``refresh_interval``-th compute the whole
    canvas; the others what was masked one step before. Dream: every
    ``refresh_interval``-th step computes the whole canvas; the others leave out
    positions whose next token was known one step before, and the last position from
    step 2 on.
    """
    buffer, last = Buffer(run), run.length - 1
    rows_of_next = whole = list(range(run.length))
    for step in run.passes():
        refreshes = step % refresh_interval == 0 or (
            step == 1 and not run.model.is_dream
        )
        last_predicting = run.cut - (
            run.model.is_dream and run.cut < run.length and not refreshes
        )
        rows = [
            p for p in (whole if refreshes else rows_of_next) if p < last_predicting
        ]
        rows_of_next = run.masked(0, run.length)
        if run.model.is_dream:
            masked = set(rows_of_next)
            rows_of_next = [
                p for p in whole if (step == 0 if p == last else p + 1 in masked)
            ]
        run.fill(buffer.forward(rows, range(run.cut)), rows)


def plain_freecache(
    run: Decoding, *, include_suffix: bool = True, cache_block_length: int | None = None
) -> None:
    """Dream goes by its block rule, also if there is one block only."""
    run.window_alone = True
    prompt_length = len(run.prompt)
    size = cache_block_length or run.block_length

    def clean(first: int) -> int:
        """Positions whose keys and values are cached when the window begins at
        ``first``.
        """
        return prompt_length + (first - prompt_length) // size * size

    buffer, num_layers = Buffer(run), len(run.model.layers)
    retained = run.traces["retained_positions"] = []
    for step in run.passes():
        first, end = run.window
        cached = clean(first)
        last_fed = len(run.seen) if include_suffix else min(end, run.cut)
        if not run.order:
            start, last_fed = 0, len(run.seen)
        else:
            begins = step == 0 and run.running_before
            start = clean(run.blocks[run.running_before[0]][0]) if begins else cached
        if not run.order or start < cached:
            # What later passes of the window find in the cache.
            retained.append([list(range(cached))] * num_layers)
        fed = range(start, last_fed)
        run.fill(buffer.forward(fed, range(last_fed)), fed)


def plain_delayed(
    run: Decoding, *, cache_delay: int = 1, refresh_interval: int = 10_000
) -> None:
    """d3LLM's cache: finished blocks are kept some passes after they were finished."""
    buffer, num_layers = Buffer(run), len(run.model.layers)
    blocks = [(0, len(run.prompt)), *run.blocks]
    retained = run.traces["retained_positions"] = []
    reached = {0: 0}
    """When each block was first found finished with all before it."""
    kept = 0
    for number, _ in enumerate(run.passes(), start=1):
        stores, waits = kept, False
        for block, (first, end) in enumerate(blocks):
            if end <= kept:
                continue
            if block > 0 and run.masked(first, end):
                break
            if number - reached.setdefault(block, number) >= cache_delay:
                stores = end
            else:
                waits = True
                if not run.model.is_dream:
                    break
        refreshes = stores == kept and (
            not kept or waits or number % refresh_interval == 0
        )
        clean = 0 if refreshes else kept
        if stores > kept or (refreshes and kept):
            run.cut = run.length
        fed = range(clean, len(run.seen))
        logits = buffer.forward(fed, run.seen)
        if run.model.is_dream and clean:
            logits[clean - 1] = logits[clean]
        if stores > kept or (refreshes and kept):
            retained.append([list(range(stores))] * num_layers)
        kept = stores
        run.fill(logits, fed)
