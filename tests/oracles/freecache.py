"""FreeCache as slow, plain PyTorch. Dream goes by its block rule, also if there is one block only."""

from tests.oracles.buffer import Buffer
from tests.oracles.decoding import Decoding


def plain_freecache(run: Decoding, *, include_suffix: bool = True, cache_block_length: int | None = None) -> None:
    run.window_alone = True
    prompt_length, size = len(run.prompt), cache_block_length or run.block_length

    def clean(first: int) -> int:
        """Positions whose keys and values are cached when the window begins at ``first``."""
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
